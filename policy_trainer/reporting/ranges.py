"""The metrics that have a plot, in this order, with their healthy ranges: for warnings, pages and docs/metrics.md.

After a change: `.venv/bin/python -m tools.metrics_page`.
"""

from math import inf
from typing import NamedTuple

# Metrics are averaged over this many steps, since those of one step are noisy.
WINDOW = 20
# A clip ratio is reported after it has been 0 for this many steps.
LONG = 60
# The entropy must stay above this share of its beginning, or above the second one where the reward rises.
ENTROPY_LEFT, ENTROPY_LEFT_LEARNING = 0.1, 0.01
# `truncated` may grow by so much.
TRUNCATED_GAIN = 0.1
# A smaller KL may triple: it is noise.
LOW_KL = 0.2
# So many of the completions may be unrewarded.
UNREWARDED_SHARE = 0.05


class Metric(NamedTuple):
    """meaning: in Markdown. low, high: the bounds of a range that is the same in every run. also: what else is healthy,
    in words. too_low, too_high: the remedies, of metrics that the trainer watches."""

    name: str
    title: str
    unit: str
    meaning: str
    also: str = ""
    low: float = -inf
    high: float = inf
    too_low: str = ""
    too_high: str = ""
    kind: str = "step"

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


METRICS = (
    Metric("reward", "Reward", "", "mean weighted total over the completions that received a reward", "rising"),
    Metric(
        "accuracy", "Held-out accuracy", "share",
        "share of correct answers (with several per problem, their mean); missing if no problem has a gold answer or "
        "no reward measures correctness", "rising", kind="evaluation",
    ),
    Metric("reward", "Held-out reward", "", "mean weighted total on held-out problems", "rising", kind="evaluation"),
    # Of fine-tuning and reward models, which report to no server.
    Metric("eval_loss", "Held-out loss", "", "", "falling", kind="evaluation"),
    Metric("perplexity", "Held-out perplexity", "", "", "falling", kind="evaluation"),
    Metric("reward_margin", "Held-out reward margin", "", "", "rising", kind="evaluation"),
    Metric(
        "reward_std", "Reward std", "", "standard deviation of the reward over the step's completions",
        "above 0",
    ),
    Metric(
        "kl", "KL to the reference", "nats/token",
        "KL divergence from the reference, estimated by `loss.kl`, before each update; `null` without a reference",
        f"not tripling within {WINDOW} steps to more than {LOW_KL:g}", high=1,
        too_high="the policy drifts too far from the reference: lower optimizer.learning_rate, or raise loss.beta",
    ),
    Metric(
        "clip_ratio", "Clip ratio", "", "share of tokens whose ratio is clipped",
        f"and above 0 within {LONG} steps", high=0.3,
        too_low="no token is ever clipped, which is normal with one update of fresh samples; otherwise clipping has no "
        "effect: raise optimizer.learning_rate",
        too_high="lower optimizer.learning_rate, publish_every, num_iterations or minibatches",
    ),
    Metric(
        "entropy", "Entropy", "nats/token", "entropy of the policy",
        f"above {ENTROPY_LEFT:.0%} of its initial value ({ENTROPY_LEFT_LEARNING:.0%} if the reward rises)",
        too_low="completions lose diversity: raise loss.epsilon_high, sampling.temperature or loss.entropy.coef, or "
        "lower optimizer.learning_rate",
    ),
    Metric("completion_length_mean", "Completion length", "tokens", "mean length of the completions"),
    Metric(
        "truncated", "Truncated completions", "", "share of completions cut off at the length limit",
        f"at most {TRUNCATED_GAIN:g} above its initial value",
        too_high="raise the limit, add the soft_overlong reward, or set loss.truncated = mask",
    ),
    Metric(
        "staleness", "Staleness", "steps", "mean age of the weights that sampled the batches", high=16,
        too_high="lower publish_every or max_waiting, set max_lag, or set order = freshest",
    ),
    Metric(
        "grad_norm", "Gradient norm", "", "gradient norm before clipping to `optimizer.max_grad_norm`",
    ),
    Metric(
        "frac_reward_zero_std", "Groups with zero reward std", "", "share of groups whose rewards are all equal",
        high=0.8,
        too_high="most groups have no gradient: use harder or easier prompts, or raise sampling.num_generations or "
        "sampling.max_resamples, or set sampling.regroup",
    ),
    Metric(
        "waiting_share", "Trainer waiting share", "",
        "share of time that the trainer waits; high: sampling or scoring is too slow", "low",
    ),
    Metric(
        "sampler_waiting_share", "Worker waiting share", "",
        "share of time that workers wait; high: training or scoring is too slow", "low",
    ),
    Metric(
        "tokens_per_second", "Training throughput", "tokens/s", "`tokens` over training and waiting time together",
    ),
    Metric("loss", "Loss", "", "mean loss of the step's updates"),
    Metric(
        "ratio_mean", "Mean policy ratio", "", "mean ratio of the policy to `old_logps`, before truncation", "about 1",
    ),
    Metric(
        "effective_sample_size", "Effective sample size", "share",
        "(sum w)^2 / (n sum w^2) of w = exp(log-prob - the sampler's): the share of the samples that counts",
        low=0.5,
        too_low="sampler and learner disagree: lower publish_every, set max_lag, or set "
        "loss.importance_sampling_correction = tis with loss.old_logps = recomputed",
    ),
    Metric(
        "masked_ratio", "Masked tokens", "", "share of tokens that `loss.mask` removes from the loss's surrogate",
        high=0.5,
        too_high="the policy is far from its samples: lower publish_every, set max_lag, or widen the bounds of "
        "loss.mask",
    ),
    Metric(
        "probe_logp_difference", "Workers' log-prob difference", "nats",
        "after each update of its weights a worker compares its log-probs of a few tokens with the trainer's: mean of "
        "|difference|; beyond `sampling.max_logp_difference` the worker stops", high=0.1,
        too_high="workers do not have the weights that were published, or compute differently from the trainer: "
        "check the engine's precision and attention, and restart the workers",
    ),
    Metric(
        "advantage_std", "Advantage std", "",
        "standard deviation of the advantages over completions with at least one trained token",
        "where advantages are scaled",
        low=0.5, high=1.5,
        too_low="rewards differ by less than loss.advantage_eps: scale the rewards up (reward_weights), or lower the "
        "latter",
        too_high="a few completions outweigh all others: check reward_std/<name> of each reward, and bound the rewards",
    ),
    Metric(
        "unrewarded", "Completions without a reward", "completions",
        "completions whose reward, or the reward of one of their steps, is missing",
        f"at most {UNREWARDED_SHARE:.0%} of the completions",
        too_high="completions without a reward do not train: see the worker's log, raise judging.seconds, or fix a "
        "reward that returns NaN",
    ),
    Metric(
        "teacher_kl", "KL to the teacher", "nats/token",
        "mean of log policy - log teacher over the tokens that train, of `loss.old_logps`: estimates KL(policy to the "
        "teacher); `null` without a teacher", "falling",
    ),
)  # fmt: skip
STEP_METRICS = {metric.name: metric for metric in METRICS if metric.kind == "step"}
