"""Every metric of a run, in one table: how it is computed from tokens, what it means, and which values are healthy.

metrics.jsonl, trackers, warnings, the dashboard's plots and docs/metrics.md come from it. After a change:
`.venv/bin/python -m tools.metrics_page`.
"""

from math import inf
from typing import Literal, NamedTuple

# Metrics are averaged over this many steps, since those of one step are noisy.
WINDOW = 20
# A clip ratio is reported after it has been 0 for this many steps.
LONG = 60
# The entropy must stay above the first share of its initial value, or above the second one while the reward rises.
ENTROPY_LEFT, ENTROPY_LEFT_LEARNING = 0.1, 0.01
# `truncated` may rise by this much above its initial value.
TRUNCATED_GAIN = 0.1
# A KL below this may triple: it is noise.
LOW_KL = 0.2
# This share of the completions may be without a reward.
UNREWARDED_SHARE = 0.05


# The learner computes these from the values of tokens (`learner/step_stats.py`):
# mean, min, max: over the tokens that train, in all updates
# update: the mean over updates of a value that each update has once
# effective_size: (sum w)^2 / (n sum w^2), where w are the weights of the n tokens that train
Reduction = Literal["", "mean", "min", "max", "update", "effective_size"]


class Metric(NamedTuple):
    """One metric of `METRICS`.

    name: `<name>` in it stands for any text. meaning: in Markdown. title: the title of its plot; a metric without one
    has a plot under its name, after the others.

    reduction: how the values of tokens become one number; empty if the metric is not computed from those.
    each_update: whether each update has the metric, as well as the step. low, high: the bounds of a range that is the
    same in every run. also: what else is healthy, in words. too_low, too_high: the remedies; the trainer watches
    metrics that have one. kind: the kind of the records that contain it. when: which runs report it; empty: all.
    """

    name: str
    meaning: str
    unit: str = ""
    title: str = ""
    reduction: Reduction = ""
    each_update: bool = False
    also: str = ""
    low: float = -inf
    high: float = inf
    too_low: str = ""
    too_high: str = ""
    kind: Literal["all", "step", "evaluation", "health"] = "step"
    when: str = ""

    @property
    def healthy(self) -> str:
        """The range in words; empty without one."""
        at_least = f"at least {self.low:g}" if self.low > -inf else ""
        at_most = f"at most {self.high:g}" if self.high < inf else ""
        bounds = f"{self.low:g} to {self.high:g}" if at_least and at_most else at_least or at_most
        return ", ".join(filter(None, (bounds, self.also)))

    @property
    def better(self) -> str:
        """higher or lower, of metrics of which either is better in itself; else empty."""
        return {"rising": "higher", "falling": "lower", "low": "lower"}.get(self.also, "")

    @property
    def watched(self) -> bool:
        """Whether the trainer warns if it leaves its range."""
        return bool(self.too_low or self.too_high)


# In the order of their plots; docs/metrics.md has them in this order, too, by kind.
METRICS = (
    Metric("kind", "`step`, `evaluation` or `health`", kind="all"),
    Metric("step", "training steps done", unit="steps", kind="all"),
    Metric("reward", "mean weighted total over the completions that received a reward", title="Reward", also="rising"),
    Metric("reward/<name>", "mean of one reward, before its weight"),
    Metric(
        "accuracy", "share of correct answers (with several per problem, their mean); missing if no problem has a "
        "gold answer or no reward measures correctness", unit="share", title="Held-out accuracy", also="rising",
        kind="evaluation",
    ),
    Metric("low", "lower end of the accuracy's 95% interval (Wilson), over problems", kind="evaluation"),
    Metric("high", "upper end of that interval", kind="evaluation"),
    Metric(
        "num_generations", "answers to each problem, where `evaluation.num_generations` is above 1", unit="answers",
        kind="evaluation", when="several",
    ),
    Metric(
        "pass_at_n", "share of problems that have a right answer among these (pass@n)", also="rising",
        kind="evaluation", when="several",
    ),
    Metric(
        "reward", "mean weighted total on held-out problems", title="Held-out reward", also="rising",
        kind="evaluation",
    ),
    # Of fine-tuning and reward models, which report to no server.
    Metric("eval_loss", "", title="Held-out loss", also="falling", kind="evaluation"),
    Metric("perplexity", "", title="Held-out perplexity", also="falling", kind="evaluation"),
    Metric("reward_margin", "", title="Held-out reward margin", also="rising", kind="evaluation"),
    Metric("rewards", "mean of each reward, by name", kind="evaluation"),
    Metric(
        "logged", "what reward functions logged with [log_metric](rewards.md#numbers-and-texts-of-your-own), by name",
        kind="evaluation",
    ),
    Metric(
        "trl", "in runs of `policy_trainer.trl`: the metrics of this evaluation under [TRL's "
        "names](coming-from-trl.md#metrics)", kind="evaluation",
    ),
    Metric("decoding", "`greedy`; with several answers to a problem `sampled at` a temperature", kind="evaluation"),
    Metric("problems", "held-out problems that were answered and judged", unit="problems", kind="evaluation"),
    Metric("finished", "share of answers that ended by themselves", kind="evaluation"),
    Metric("mean_tokens", "mean length of the answers", unit="tokens", kind="evaluation"),
    Metric(
        "left_out", "problems whose prompt was too long, or whose answer cannot be judged", unit="problems",
        kind="evaluation",
    ),
    Metric("completions_total", "completions trained on so far", unit="completions", kind="evaluation"),
    Metric(
        "runtime_seconds", "training time so far: waiting, evaluations and checkpoints included, but not the first "
        "evaluation or the time between a stop and its resume", unit="seconds", kind="evaluation",
    ),
    Metric(
        "reward_std", "standard deviation of the reward over the step's completions", title="Reward std",
        also="above 0",
    ),
    Metric("reward_std/<name>", "standard deviation of one reward"),
    Metric(
        "logged/<name>", "what a reward function logged with [log_metric](rewards.md#numbers-and-texts-of-your-own)",
    ),
    Metric(
        "kl", "KL divergence from the reference, estimated by `loss.kl`, before each update; `null` without a "
        "reference", unit="nats/token", title="KL to the reference", reduction="mean", each_update=True,
        also=f"not tripling within {WINDOW} steps to more than {LOW_KL:g}", high=1,
        too_high="the policy drifts too far from the reference: lower optimizer.learning_rate, or raise loss.beta",
    ),
    Metric(
        "kl_at_step_0", "only in the first step: k3 to the reference before any update", unit="nats/token",
        also="below 1e-9 in float32",
    ),
    Metric(
        "kl_noise_floor", "KL of the policy to itself in two packings: a smaller `kl` is noise", unit="nats/token",
        also="below 1e-9 in float32",
    ),
    Metric(
        "clip_ratio", "share of tokens whose ratio is clipped", title="Clip ratio", each_update=True,
        also=f"and above 0 within {LONG} steps", high=0.3, too_low="no token is ever clipped, which is normal with "
        "one update of fresh samples; otherwise clipping has no effect: raise optimizer.learning_rate",
        too_high="lower optimizer.learning_rate, publish_every, num_iterations or minibatches",
    ),
    Metric(
        "clip_ratio_low", "share of tokens whose ratio is clipped at the lower bound", reduction="mean",
        each_update=True,
    ),
    Metric(
        "clip_ratio_low_min", "the smallest share of a completion's tokens that any update clipped at the lower bound",
        reduction="min", each_update=True,
    ),
    Metric(
        "clip_ratio_high", "share of tokens whose ratio is clipped at the upper bound", reduction="mean",
        each_update=True,
    ),
    Metric(
        "clip_ratio_high_max", "the largest share of a completion's tokens that any update clipped at the upper bound",
        reduction="max", each_update=True,
    ),
    Metric(
        "entropy", "entropy of the policy", unit="nats/token", title="Entropy", reduction="mean", each_update=True,
        also=f"above {ENTROPY_LEFT:.0%} of its initial value ({ENTROPY_LEFT_LEARNING:.0%} if the reward rises)",
        too_low="completions lose diversity: raise loss.epsilon_high, sampling.temperature or loss.entropy.coef, or "
        "lower optimizer.learning_rate",
    ),
    Metric("entropy_coef", "coefficient of the entropy bonus after the step, by `loss.entropy`", each_update=True),
    Metric("completion_length_mean", "mean length of the completions", unit="tokens", title="Completion length"),
    Metric("completion_length_min", "length of the shortest completion", unit="tokens"),
    Metric("completion_length_max", "length of the longest completion", unit="tokens"),
    Metric(
        "finished_length_mean", "mean length of the completions that were not cut off at the limit; `null` if all "
        "were", unit="tokens",
    ),
    Metric("finished_length_min", "length of the shortest of them", unit="tokens"),
    Metric("finished_length_max", "length of the longest of them", unit="tokens"),
    Metric("prompt_length_mean", "mean length of the completions' prompts", unit="tokens"),
    Metric(
        "truncated", "share of completions cut off at the length limit", title="Truncated completions",
        also=f"at most {TRUNCATED_GAIN:g} above its initial value", too_high="raise the limit, add the soft_overlong "
        "reward, or set loss.truncated = mask",
    ),
    Metric(
        "staleness", "mean age of the weights that sampled the batches", unit="steps", title="Staleness", high=16,
        too_high="lower publish_every or max_waiting, set max_lag, or set order = freshest",
    ),
    Metric("staleness_max", "age of the oldest of these weights", unit="steps"),
    Metric("reference_version_min", "lowest version of the reference that scored the batches"),
    Metric("reference_version_max", "the highest; it differs from the lowest if the reference was replaced meanwhile"),
    Metric(
        "grad_norm", "gradient norm before clipping to `optimizer.max_grad_norm`", title="Gradient norm",
        each_update=True,
    ),
    Metric("learning_rate", "learning rate of the last update", each_update=True),
    Metric("updates", "updates of the optimizer in the step", unit="updates"),
    Metric("each_update", "a list with one entry per update: its"),
    Metric("not_finite", "a loss or gradient was not finite, and made no update", also="false"),
    Metric(
        "frac_reward_zero_std", "share of groups whose rewards are all equal", title="Groups with zero reward std",
        high=0.8, too_high="most groups have no gradient: use harder or easier prompts, or raise "
        "sampling.num_generations or sampling.max_resamples, or set sampling.regroup; where the completions of a group "
        "have become alike, lower optimizer.learning_rate",
    ),
    Metric("groups", "groups that trained", unit="groups"),
    Metric("groups_left_out", "groups that did not train", unit="groups"),
    Metric(
        "waiting_share", "share of time that the trainer waits; high: sampling or scoring is too slow",
        title="Trainer waiting share", also="low",
    ),
    Metric("waiting_seconds", "time that it waits for batches before the step", unit="seconds"),
    Metric("training_seconds", "time that the trainer works on the step", unit="seconds"),
    Metric(
        "sampler_waiting_share", "share of time that workers wait; high: training or scoring is too slow",
        title="Worker waiting share", also="low",
    ),
    Metric("sampler_waiting_seconds", "time that workers waited for room in the queue and for uploads", unit="seconds"),
    Metric("sampling_seconds", "time that workers spent on the step's batches, judging included", unit="seconds"),
    Metric("judging_seconds", "part of these that the rewards took", unit="seconds"),
    Metric(
        "sampler_tokens_per_second", "all completion tokens, over `sampling_seconds`: the throughput of one worker",
        unit="tokens/s",
    ),
    Metric(
        "tokens_per_second", "`tokens` over training and waiting time together", unit="tokens/s",
        title="Training throughput",
    ),
    Metric("tokens", "tokens that trained", unit="tokens"),
    Metric(
        "runtime_seconds", "training time so far: waiting, evaluations and checkpoints included, but not the first "
        "evaluation or the time between a stop and its resume", unit="seconds",
    ),
    Metric("loss", "mean loss of the step's updates", title="Loss", reduction="update", each_update=True),
    Metric(
        "policy_loss", "mean loss without the entropy bonus, ECHO and the router loss", reduction="update",
        each_update=True,
    ),
    Metric(
        "echo_loss", "cross-entropy of what tools and environments answered, before `loss.echo_coef`, mean over the "
        "tokens of an update, then over the step's updates; `null` without a coefficient or an answer",
        unit="nats", reduction="update", each_update=True, also="falling",
    ),
    Metric(
        "aux_loss", "load-balancing loss of a mixture of experts, before `loss.router_aux_loss_coef`, mean over the "
        "step's updates. It is the number of experts per token if all are equally busy; `null` without a coefficient",
        reduction="update", each_update=True, also="not rising",
    ),
    Metric(
        "ratio_mean", "mean ratio of the policy to `old_logps`, before truncation", title="Mean policy ratio",
        reduction="mean", also="about 1",
    ),
    Metric("ratio_min", "smallest ratio of the policy to `old_logps`, before truncation", reduction="min"),
    Metric("ratio_max", "largest ratio of the policy to `old_logps`, before truncation", reduction="max"),
    Metric(
        "effective_sample_size", "(sum w)^2 / (n sum w^2) of w = exp(log-prob - the sampler's): the share of the "
        "samples that counts", unit="share", title="Effective sample size", reduction="effective_size", low=0.5,
        too_low="sampler and learner disagree: lower publish_every, set max_lag, or set "
        "loss.importance_sampling_correction = tis with loss.old_logps = recomputed",
    ),
    Metric(
        "importance_sampling_ratio_mean", "mean of w = exp(log-prob - the sampler's), by token or by sequence, before "
        "truncation; with `loss.importance_sampling_correction = none` too", reduction="mean", also="about 1",
    ),
    Metric("importance_sampling_ratio_min", "the smallest w", reduction="min"),
    Metric("importance_sampling_ratio_max", "the largest w", reduction="max"),
    Metric(
        "importance_sampling_clip_ratio", "share of tokens whose correction was truncated or became 0",
        reduction="mean",
    ),
    Metric(
        "sampling_logp_difference_mean", "mean of |log-prob - the sampler's|", unit="nats", reduction="mean",
        also="far below `entropy`",
    ),
    Metric("sampling_logp_difference_max", "the largest |log-prob - the sampler's|", unit="nats", reduction="max"),
    Metric(
        "masked_ratio", "share of tokens that `loss.mask` removes from the loss's surrogate", title="Masked tokens",
        reduction="mean", high=0.5, too_high="the policy is far from its samples: lower publish_every, set max_lag, "
        "or widen the bounds of loss.mask",
    ),
    Metric(
        "probe_logp_difference", "after each update of its weights a worker compares its log-probs of a few tokens "
        "with the trainer's: mean of |difference|; beyond `sampling.max_logp_difference` the worker stops",
        unit="nats", title="Workers' log-prob difference", high=0.1, too_high="workers do not have the weights that "
        "were published, or compute differently from the trainer: check the engine's precision and attention, and "
        "restart the workers",
    ),
    Metric("probe_logp_difference_max", "the largest of these differences", unit="nats"),
    Metric(
        "advantage_std", "standard deviation of the advantages over completions with at least one trained token",
        title="Advantage std", also="where advantages are scaled", low=0.5, high=1.5,
        too_low="rewards differ by less than loss.advantage_eps: scale the rewards up (reward_weights), or lower the "
        "latter", too_high="a few completions outweigh all others: check reward_std/<name> of each reward, and bound "
        "the rewards",
    ),
    Metric(
        "unrewarded", "completions whose reward, or the reward of one of their steps, is missing", unit="completions",
        title="Completions without a reward", also=f"at most {UNREWARDED_SHARE:.0%} of the completions",
        too_high="completions without a reward do not train: see the worker's log, raise judging.seconds, or fix a "
        "reward that returns NaN",
    ),
    Metric("unrewarded/<name>", "completions that this reward could not judge", unit="completions"),
    Metric(
        "teacher_kl", "mean of log policy - log teacher over the tokens that train, of `loss.old_logps`: estimates "
        "KL(policy to the teacher); `null` without a teacher", unit="nats/token", title="KL to the teacher",
        also="falling",
    ),
    Metric("epoch", "0, plus 1 whenever the run is resumed"),
    Metric("completions", "completions of the step's batches", unit="completions"),
    Metric("completions_total", "completions trained on so far", unit="completions"),
    Metric("problems", "indexes of the problems"),
    Metric("batch_ids", "ids of the batches"),
    Metric("dropped_prompts", "problems dropped because their prompts were too long or unusable", unit="problems"),
    Metric("resampled_groups", "groups replaced because their rewards were all equal", unit="groups"),
    Metric("resampled_tokens", "completion tokens of these", unit="tokens"),
    Metric("redelivered", "batches that were leased again because a lease was lost", unit="batches", also="0"),
    Metric("queued", "batches of the run that wait to be scored", unit="batches"),
    Metric("scoring", "batches that are being scored", unit="batches"),
    Metric("ready", "batches that wait to be trained on", unit="batches"),
    Metric("expired", "batches that were too old or abandoned", unit="batches"),
    Metric("dead", "batches that cannot be scored or trained on", unit="batches", also="0"),
    Metric(
        "unusable_batches", "how often this process gave a batch back with an error; its log says why",
        unit="deliveries", also="0",
    ),
    Metric(
        "refused_batches", "batches that the server refused, in the run so far: they lie in `RUN_DIR/workers`",
        unit="batches", also="0",
    ),
    Metric(
        "server_scoring_seconds", "time that the reference server spent on log-probs of all runs since it started",
        unit="seconds",
    ),
    Metric("eval_step", "step of the latest evaluation"),
    Metric(
        "eval_accuracy", "accuracy of the latest evaluation; missing if problems have no gold answers or no reward "
        "judges correctness", unit="share", also="rising",
    ),
    Metric("eval_reward", "mean reward of the latest evaluation", also="rising"),
    Metric(
        "tools/call_frequency", "with [tools](tools.md): calls for each completion; `/<name>`: of one tool",
        when="tools",
    ),
    Metric("tools/failure_frequency", "share of the calls that failed; `/<name>`: of one tool", when="tools"),
    Metric("tools/failures/<kind>", "failed calls of a kind, such as `wrong_arguments`", unit="calls", when="tools"),
    Metric("turns_mean", "mean of the model's turns in a rollout", unit="turns", when="tools"),
    Metric("rollout_seconds_mean", "mean time of a rollout, with that of its tools", unit="seconds", when="tools"),
    Metric("rollout_seconds_max", "time of the longest rollout", unit="seconds", when="tools"),
    Metric(
        "rollouts/<end>", "share of the rollouts that ended so: `finished`, `truncated`, `out_of_turns`, "
        "`out_of_time`, `no_bridge`", when="tools",
    ),
    Metric("name", "the metric that has left its range", kind="health"),
    Metric("seen", "its mean over the last 20 steps", kind="health"),
    Metric("band", "its healthy range", kind="health"),
    Metric("remedy", "what to try", kind="health"),
)  # fmt: skip
STEP_METRICS = {metric.name: metric for metric in METRICS if metric.kind in ("all", "step")}
# Beginnings of names that are taken: by those with `<name>` in the table, by evaluations, and by TRL.
_TAKEN = (*(name.partition("<")[0] for name in STEP_METRICS if "<" in name), "tools/", "eval_", "rewards/")


def is_taken(name: str) -> bool:
    """Whether a step has, or may have, a metric of that name, so that no surrogate of a user may return it."""
    return name in STEP_METRICS or name.startswith(_TAKEN)
