"""The metrics that have a plot, in this order, with their healthy ranges: for warnings, pages and docs/metrics.md.

After a change: `.venv/bin/python -m tests.metrics_page`.
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


METRICS = (
    Metric("reward", "Reward", "", "mean over the completions that were judged", "rising"),
    Metric(
        "accuracy", "Accuracy, held out", "share",
        "share of right answers, of several to a problem their mean; none where problems have no gold answers or no "
        "reward judges correctness", "rising", kind="evaluation",
    ),
    Metric("reward", "Reward, held out", "", "mean of the weighted totals", "rising", kind="evaluation"),
    # Of fine-tuning and reward models, which appear only in reports.
    Metric("eval_loss", "Loss, held out", "", "", kind="evaluation"),
    Metric("perplexity", "Perplexity, held out", "", "", kind="evaluation"),
    Metric("reward_margin", "Margin, held out", "", "", kind="evaluation"),
    Metric(
        "reward_std", "Spread of the reward", "", "standard deviation of the reward over the step's completions",
        "above 0",
    ),
    Metric(
        "kl", "KL to the reference", "nats a token",
        "KL to the reference, by `loss.kl`, before each update; `null` without a reference",
        f"not tripling within {WINDOW} steps", high=1,
        too_high="the policy drifts too far from the reference: lower optimizer.learning_rate, or raise loss.beta",
    ),
    Metric(
        "clip_ratio", "Clipped tokens", "", "share of tokens whose ratio is clipped",
        f"and above 0 within {LONG} steps", high=0.3,
        too_low="the ratio is inert: raise optimizer.learning_rate",
        too_high="lower optimizer.learning_rate, publish_every, num_iterations or minibatches",
    ),
    Metric(
        "entropy", "Entropy", "nats a token", "entropy of the policy",
        f"above {ENTROPY_LEFT:.0%} of its beginning, or {ENTROPY_LEFT_LEARNING:.0%} where the reward rises",
        too_low="completions become alike: raise loss.epsilon_high, sampling.temperature or loss.entropy.coef, or "
        "lower optimizer.learning_rate",
    ),
    Metric("completion_length_mean", "Length", "tokens", "mean length of the completions"),
    Metric(
        "truncated", "Cut off", "", "share of completions cut off at the length limit",
        f"at most {TRUNCATED_GAIN:g} above its beginning",
        too_high="raise the limit, add the reward soft_overlong, or set loss.truncated = mask",
    ),
    Metric(
        "staleness", "Staleness", "steps", "mean age of the weights that sampled the batches", high=16,
        too_high="lower publish_every or max_waiting, set max_lag, or set order = freshest",
    ),
    Metric(
        "grad_norm", "Gradient norm", "", "norm of the gradient before it is scaled down to `optimizer.max_grad_norm`",
    ),
    Metric(
        "frac_reward_zero_std", "Groups of equal rewards", "", "share of groups whose rewards are all equal", high=0.8,
        too_high="most groups teach nothing: use harder or easier prompts, or raise sampling.num_generations or "
        "sampling.max_resamples, or set sampling.regroup",
    ),
    Metric(
        "waiting_share", "Trainer waits", "",
        "share of the trainer's time that it waits: high means that sampling or scoring is too slow", "low",
    ),
    Metric(
        "sampler_waiting_share", "Workers wait", "",
        "share of the workers' time that they wait: high means that training or scoring is too slow", "low",
    ),
    Metric(
        "tokens_per_second", "Training speed", "tokens a second", "`tokens` over training and waiting time together",
    ),
    Metric("loss", "Loss", "", "mean over the step's updates"),
    Metric("ratio_mean", "Mean ratio", "", "mean ratio of the policy to `old_logps`, before truncation", "about 1"),
    Metric(
        "effective_sample_size", "Effective sample size", "share",
        "(sum w)^2 / (n sum w^2) of w = exp(log-prob - the sampler's): the share of the samples that counts",
        low=0.5,
        too_low="sampler and learner disagree: lower publish_every, set max_lag, or set "
        "loss.importance_sampling_correction = tis with loss.old_logps = recomputed",
    ),
    Metric(
        "masked_ratio", "Masked tokens", "", "share of tokens whose surrogate a mask of `loss.mask` took away",
        high=0.5,
        too_high="the policy is far from its samples: lower publish_every, set max_lag, or widen the bounds of "
        "loss.mask",
    ),
    Metric(
        "probe_logp_difference", "Workers' log-prob difference", "nats",
        "after each update of its weights a worker compares its log-probs of a few tokens with the trainer's: mean of "
        "|difference|; beyond `sampling.max_logp_difference` the worker stops", high=0.1,
        too_high="workers do not have the weights that were published, or compute otherwise than the trainer: look at "
        "the engine's precision and attention, and restart the workers",
    ),
    Metric(
        "advantage_std", "Spread of the advantages", "",
        "standard deviation over the completions with a token that trains", "where advantages are scaled",
        low=0.5, high=1.5,
        too_low="rewards differ by less than loss.advantage_eps: scale them up (reward_weights), or lower it",
        too_high="a few completions outweigh all others: look at reward_std of each part, and bound the rewards",
    ),
    Metric(
        "unrewarded", "Without a reward", "completions",
        "completions that lack a reward, or a reward of a step",
        f"at most {UNREWARDED_SHARE:.0%} of the completions",
        too_high="completions without a reward do not train: see the worker's log, raise judging.seconds, or fix a "
        "reward that returns NaN",
    ),
    Metric(
        "teacher_kl", "KL to the teacher", "nats a token",
        "mean of log policy - log teacher over the tokens that train, of `loss.old_logps`: estimates KL(policy to the "
        "teacher); `null` without a teacher", "falling",
    ),
)  # fmt: skip
STEP_METRICS = {metric.name: metric for metric in METRICS if metric.kind == "step"}
