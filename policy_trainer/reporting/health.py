"""Warnings about a run: the band that each metric should lie in, and what to change when it does not."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from policy_trainer.config import LossConfig
from policy_trainer.reporting.conversations import limit_of

Records = Sequence[Mapping[str, Any]]

# Metrics are averaged over this many steps, since those of one step are noisy.
WINDOW = 20
# A clip ratio is reported after it has been 0 for this many steps.
LONG = 60


@dataclass(frozen=True)
class Trouble:
    """A metric out of its band. seen: its mean over the latest WINDOW or LONG steps. quiet: it is reported again only
    after more steps than this without it."""

    name: str
    seen: float
    band: str
    remedy: str
    quiet: float = WINDOW

    def __str__(self) -> str:
        return f"{self.name} is {self.seen:.3g}, healthy is {self.band}: {self.remedy}"


class Health:
    """Watches a run. It reports each trouble once, and again only after WINDOW steps without it."""

    def __init__(self, loss: LossConfig, past: Records = ()) -> None:
        """past: the records of metrics.jsonl from before this process."""
        self._loss = loss
        self._first: list[Mapping[str, Any]] = []
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=LONG)
        self._seen: dict[str, int] = {record["name"]: record["step"] for record in past if record["kind"] == "health"}
        steps = [record for record in past if record["kind"] == "step"]
        for record in steps[:-WINDOW]:
            self._remember(record)
        for record in steps[-WINDOW:]:  # their troubles have been reported
            self.observe(record)

    def observe(self, record: Mapping[str, Any]) -> list[Trouble]:
        """The troubles that are new at this step."""
        self._remember(record)
        troubles = diagnose(self._first, list(self._recent), self._loss)
        step = record["step"]
        new = [item for item in troubles if item.name not in self._seen or step - self._seen[item.name] > item.quiet]
        self._seen |= {trouble.name: step for trouble in troubles}
        return new

    def _remember(self, record: Mapping[str, Any]) -> None:
        if len(self._first) < WINDOW:
            self._first.append(record)
        self._recent.append(record)


def health_record(trouble: Trouble, step: int) -> dict[str, Any]:
    """The record for metrics.jsonl."""
    fields = ("name", "seen", "band", "remedy")
    return {"kind": "health", "step": step, **{name: getattr(trouble, name) for name in fields}}


def diagnose(first: Records, recent: Records, loss: LossConfig) -> list[Trouble]:
    """All troubles of a run. first: its first WINDOW steps. recent: its latest steps, up to LONG, the oldest first.

    There are none before WINDOW steps, and none for a metric without a number in them.
    """
    if len(recent) < WINDOW:
        return []
    latest = recent[-WINDOW:]
    return [
        *_out_of_band(latest),
        *_variance(latest, loss),
        *_inert(recent, loss),
        *_advantages(latest, loss),
        *_kl(recent[-2 * WINDOW : -WINDOW], latest, loss),
        *_entropy(first, latest),
        *_truncation(first, latest),
        *_unrewarded(latest),
    ]


class _Band(NamedTuple):
    """words: the band in words."""

    name: str
    low: float
    high: float
    words: str
    remedy: str


# Metrics whose band is the same in every run.
_BANDS = (
    _Band(
        "clip_ratio", 0, 0.3, "at most 0.3",
        "lower optimizer.learning_rate, publish_every, num_iterations or minibatches",
    ),
    _Band(
        "effective_sample_size", 0.5, math.inf, "at least 0.5 of the tokens",
        "sampler and learner disagree: lower publish_every, set max_lag, or set "
        "loss.importance_sampling_correction = tis with loss.old_logps = recomputed",
    ),
    _Band(
        "masked_ratio", 0, 0.5, "at most 0.5 of the tokens",
        "the policy is far from its samples: lower publish_every, set max_lag, or widen the bounds of loss.mask",
    ),
    _Band(
        "probe_logp_difference", 0, 0.1, "at most 0.1 nats",
        "workers do not have the weights that were published, or compute otherwise than the trainer: look at the "
        "engine's precision and attention, and restart the workers",
    ),
    _Band(
        "staleness", 0, 16, "at most 16 steps",
        "lower publish_every or max_waiting, set max_lag, or set order = freshest",
    ),
)  # fmt: skip


def _out_of_band(latest: Records) -> Iterator[Trouble]:
    for band in _BANDS:
        seen = _mean(latest, band.name)
        if seen < band.low or seen > band.high:
            yield Trouble(band.name, seen, band.words, band.remedy)


def _variance(latest: Records, loss: LossConfig) -> list[Trouble]:
    """Groups without rewards have no variance either; _unrewarded reports those. A teacher needs no variance."""
    seen = _mean(latest, "frac_reward_zero_std")
    if not seen > 0.8 or _unrewarded(latest) or loss.distillation:
        return []
    if _mean(latest, "truncated") > 0.5:
        remedy = f"completions are cut off before they can earn anything: raise {limit_of(latest[-1])}"
    else:
        remedy = (
            "most groups have equal rewards: use harder or easier prompts, or raise sampling.num_generations or "
            "sampling.max_resamples, or set sampling.regroup"
        )
    return [Trouble("frac_reward_zero_std", seen, "at most 0.8 of the groups", remedy)]


def _inert(recent: Records, loss: LossConfig) -> list[Trouble]:
    """A clip ratio of 0 although the weights differ from those of the old log-probs. If they do not, the ratio is 1."""
    stale = [loss.old_logps in ("sampler", "log_linear") and record["staleness"] > 0 for record in recent]
    off_policy = all(old or record.get("updates", 1) > 1 for old, record in zip(stale, recent, strict=True))
    if loss.surrogate != "clip" or loss.old_logps == "current" or len(recent) < LONG or not off_policy:
        return []
    seen = _mean(recent, "clip_ratio")
    band = f"above 0 within {LONG} steps where weights move between sampling and training"
    remedy = "the ratio is inert: raise optimizer.learning_rate"
    # Told once a run: a single clipped token in a thousand steps does not make it news.
    return [Trouble("clip_ratio", seen, band, remedy, quiet=math.inf)] if seen == 0 else []


def _advantages(latest: Records, loss: LossConfig) -> list[Trouble]:
    """Advantages of groups without variance are 0 and lower the expected deviation. Those of process supervision are
    sums of scaled rewards, which may have any deviation, as what a teacher adds."""
    if loss.advantage == "process" or loss.scale == "none" or loss.distillation:
        return []
    seen = _mean(latest, "advantage_std")
    zeros = 0.0 if loss.drop_zero_variance else _mean(latest, "frac_reward_zero_std")
    remedy = None
    if seen < 0.5 * math.sqrt(1 - zeros):
        remedy = "rewards differ by less than loss.advantage_eps: scale them up (reward_weights), or lower it"
    elif seen > 1.5:
        remedy = "a few completions outweigh all others: look at reward_std of each part, and bound the rewards"
    return [Trouble("advantage_std", seen, "0.5 to 1.5", remedy)] if remedy else []


def _kl(before: Records, latest: Records, loss: LossConfig) -> list[Trouble]:
    """Not reported without a KL penalty, since nothing bounds the KL then. A renewed reference sets it back to 0."""
    seen = _mean(latest, "kl")
    renewed = len({record.get("reference_version_max") for record in (*before, *latest)}) > 1
    tripled = not renewed and seen > 0.2 and seen > 3 * _mean(before, "kl")
    if not loss.beta or not (seen > 1.0 or tripled):
        return []
    remedy = "the policy drifts too far from the reference: lower optimizer.learning_rate, or raise loss.beta"
    return [Trouble("kl", seen, f"below 1 nat a token, and not tripling within {WINDOW} steps", remedy)]


def _entropy(first: Records, latest: Records) -> list[Trouble]:
    """Entropy falls as a policy learns. When it falls and the reward does not rise, the policy has collapsed."""
    start, seen = _mean(first, "entropy"), _mean(latest, "entropy")
    earned = _mean(latest, "reward") - _mean(first, "reward")
    limit = 0.01 if earned > 0.5 * _mean(first, "reward_std") else 0.1
    if not seen < limit * start:
        return []
    remedy = (
        "completions become alike: raise loss.epsilon_high, sampling.temperature or loss.entropy.coef, or lower "
        "optimizer.learning_rate"
    )
    return [Trouble("entropy", seen, f"above {limit:.0%} of the {start:.3g} it began with", remedy)]


def _truncation(first: Records, latest: Records) -> list[Trouble]:
    start, seen = _mean(first, "truncated"), _mean(latest, "truncated")
    if not seen > start + 0.1:
        return []
    remedy = f"raise {limit_of(latest[-1])}, add the reward soft_overlong, or set loss.truncated = mask"
    return [Trouble("truncated", seen, f"not growing from the {start:.0%} it began with", remedy)]


def _unrewarded(latest: Records) -> list[Trouble]:
    seen = _mean(latest, "unrewarded") / _mean(latest, "completions")
    if not seen > 0.05:
        return []
    remedy = (
        "completions without a reward do not train: see the worker's log, raise judging.seconds, or fix a reward "
        "that returns NaN"
    )
    return [Trouble("unrewarded", seen, "at most 0.05 of the completions", remedy)]


def _mean(records: Records, name: str) -> float:
    """Mean over the records that have a finite number; NaN when none has, so that every comparison is false."""
    values = [value for record in records if (value := record.get(name)) is not None and math.isfinite(value)]
    return sum(values) / len(values) if values else math.nan
