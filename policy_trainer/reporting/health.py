"""Warnings about a run: which metric has left its healthy range (policy_trainer/metrics.py), and what to change."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from policy_trainer.config import LossConfig
from policy_trainer.metrics import (
    ENTROPY_LEFT,
    ENTROPY_LEFT_LEARNING,
    LONG,
    LOW_KL,
    STEP_METRICS,
    TRUNCATED_GAIN,
    UNREWARDED_SHARE,
    WINDOW,
)
from policy_trainer.reporting.conversations import limit_of

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Trouble:
    """A metric outside its healthy range. seen: its mean over the latest WINDOW or LONG steps. quiet: it is reported
    again only after more steps than this without it."""

    name: str
    seen: float
    band: str
    remedy: str
    quiet: float = WINDOW

    def __str__(self) -> str:
        return f"{self.name} is {self.seen:.3g} (healthy: {self.band}): {self.remedy}"


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
        *(trouble for name in _SAME_IN_EVERY_RUN for trouble in _out_of_band(name, _mean(latest, name))),
        *_variance(latest, loss),
        *_inert(recent, loss),
        *_advantages(latest, loss),
        *_kl(recent[-2 * WINDOW : -WINDOW], latest, loss),
        *_entropy(first, latest),
        *_truncation(first, latest),
        *_unrewarded(latest),
    ]


# Metrics that have a rule of their own below. All others that are watched have the same range in every run.
_RULED = ("advantage_std", "entropy", "frac_reward_zero_std", "kl", "truncated", "unrewarded")
_SAME_IN_EVERY_RUN = [name for name, metric in STEP_METRICS.items() if metric.watched and name not in _RULED]


def _out_of_band(
    name: str, seen: float, low: float | None = None, high: float | None = None, cause: str = ""
) -> list[Trouble]:
    """low, high: bounds in place of the metric's. cause: precedes its remedy."""
    metric = STEP_METRICS[name]
    if seen < (metric.low if low is None else low):
        return [Trouble(name, seen, metric.healthy, cause + metric.too_low)]
    if seen > (metric.high if high is None else high):
        return [Trouble(name, seen, metric.healthy, cause + metric.too_high)]
    return []


def _variance(latest: Records, loss: LossConfig) -> list[Trouble]:
    """Groups without rewards have no variance either; _unrewarded reports those. A teacher needs no variance."""
    if _unrewarded(latest) or loss.distillation:
        return []
    troubles = _out_of_band("frac_reward_zero_std", _mean(latest, "frac_reward_zero_std"))
    if _mean(latest, "truncated") > 0.5:
        remedy = f"completions are cut off before they can earn anything: raise {limit_of(latest[-1])}"
        return [replace(trouble, remedy=remedy) for trouble in troubles]
    return troubles


def _inert(recent: Records, loss: LossConfig) -> list[Trouble]:
    """A clip ratio of 0 although the weights differ from those of the old log-probs. If they do not, the ratio is 1."""
    stale = [loss.old_logps in ("sampler", "log_linear") and record["staleness"] > 0 for record in recent]
    off_policy = all(old or record.get("updates", 1) > 1 for old, record in zip(stale, recent, strict=True))
    clips = loss.chosen_surrogate is not None and loss.chosen_surrogate.has_two_bounds
    if not clips or loss.old_logps == "current" or len(recent) < LONG or not off_policy:
        return []
    metric, seen = STEP_METRICS["clip_ratio"], _mean(recent, "clip_ratio")
    # Told once a run: a single clipped token in a thousand steps does not make it news.
    return [Trouble(metric.name, seen, metric.healthy, metric.too_low, quiet=math.inf)] if seen == 0 else []


def _advantages(latest: Records, loss: LossConfig) -> list[Trouble]:
    """Advantages of groups without variance are 0 and lower the expected deviation. Those of process supervision are
    sums of scaled rewards, which may have any deviation, as what a teacher adds."""
    if loss.advantage == "process" or loss.scale == "none" or loss.distillation:
        return []
    seen = _mean(latest, "advantage_std")
    zeros = 0.0 if loss.drop_zero_variance else _mean(latest, "frac_reward_zero_std")
    return _out_of_band("advantage_std", seen, STEP_METRICS["advantage_std"].low * math.sqrt(1 - zeros))


def _kl(before: Records, latest: Records, loss: LossConfig) -> list[Trouble]:
    """Not reported without a KL penalty, since nothing bounds the KL then. A renewed reference sets it back to 0."""
    seen = _mean(latest, "kl")
    renewed = len({record.get("reference_version_max") for record in (*before, *latest)}) > 1
    tripled = not renewed and seen > 3 * _mean(before, "kl")
    return _out_of_band("kl", seen, high=LOW_KL if tripled else None) if loss.beta else []


def _entropy(first: Records, latest: Records) -> list[Trouble]:
    """Entropy falls as a policy learns. When it falls and the reward does not rise, the policy has collapsed."""
    start, seen = _mean(first, "entropy"), _mean(latest, "entropy")
    earned = _mean(latest, "reward") - _mean(first, "reward")
    left = ENTROPY_LEFT_LEARNING if earned > 0.5 * _mean(first, "reward_std") else ENTROPY_LEFT
    return _out_of_band("entropy", seen, low=left * start, cause=f"initially {start:.3g}; ")


def _truncation(first: Records, latest: Records) -> list[Trouble]:
    start, seen = _mean(first, "truncated"), _mean(latest, "truncated")
    cause = f"initially {start:.3g}; most are cut off by {limit_of(latest[-1])}; "
    return _out_of_band("truncated", seen, high=start + TRUNCATED_GAIN, cause=cause)


def _unrewarded(latest: Records) -> list[Trouble]:
    seen = _mean(latest, "unrewarded") / _mean(latest, "completions")
    return _out_of_band("unrewarded", seen, high=UNREWARDED_SHARE)


def _mean(records: Records, name: str) -> float:
    """Mean over the records that have a finite number; NaN when none has, so that every comparison is false."""
    values = [value for record in records if (value := record.get(name)) is not None and math.isfinite(value)]
    return sum(values) / len(values) if values else math.nan
