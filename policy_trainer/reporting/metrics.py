"""What a step left behind, as one line of JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from policy_trainer.reporting.wasted import WastedSamples
from shared.batch import RolloutBatch, ScoredBatch
from shared.client import Leased

Metrics = dict[str, Any]


class MetricsFile:
    """metrics.jsonl: a line for each step, evaluation and warning, appended and flushed at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(_without_nan(record)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Metrics]:
    """All records; a last line that a crash cut off is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def truncate_metrics(path: Path, step: int) -> None:
    """Drops what an abandoned lineage wrote beyond the step that is resumed from; all of it for a new beginning."""
    if path.exists():
        kept = [record for record in read_metrics(path) if step and record["step"] <= step]
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        temporary.replace(path)


def batch_metrics(leased: Sequence[Leased], version: int) -> Metrics:
    """What the batches of a step say of themselves: docs/metrics.md has every name.

    version: of the weights that train on them.
    """
    rollouts = [lease.rollout for lease in leased]
    samples = [_numbers(rollout.sample) for rollout in rollouts]
    lags = [version - rollout.policy_version for rollout in rollouts]
    references = [int(lease.batch.reference_version) for lease in leased if isinstance(lease.batch, ScoredBatch)]
    return {
        **_rewards(rollouts),
        **_completions(rollouts),
        **_costs(rollouts, samples),
        "staleness": float(np.mean(lags)),
        "staleness_max": max(lags),
        "reference_version_min": min(references, default=None),
        "reference_version_max": max(references, default=None),
        "redelivered": sum(lease.deliveries > 1 for lease in leased),
        "problems": [sample.get("index") for sample in samples],
    }


def next_index(leased: Sequence[Leased]) -> int:
    """One past the newest problem of a step's batches; 0 where they name none."""
    return max((_numbers(lease.rollout.sample).get("index", -1) for lease in leased), default=-1) + 1


def _rewards(rollouts: Sequence[RolloutBatch]) -> Metrics:
    """Mean and standard deviation over the completions that were judged, in all and for each part; and who was not."""
    names = sorted({name for rollout in rollouts for name in rollout.reward_parts})
    parts = {name: np.concatenate([rollout.reward_parts.get(name, []) for rollout in rollouts]) for name in names}
    rewards = {"": np.concatenate([_of_completions(rollout) for rollout in rollouts])}
    rewards |= {f"/{name}": part for name, part in parts.items()}
    return {
        f"{name}{suffix}": figure(values)
        for name, figure in (("reward", _mean), ("reward_std", _std), ("unrewarded", _missing))
        for suffix, values in rewards.items()
    }


def _of_completions(rollout: RolloutBatch) -> np.ndarray:
    """NaN where a completion, or a step of it, has no reward: it does not train."""
    return rollout.rewards if rollout.steps is None else np.where(rollout.steps.unrewarded, np.nan, rollout.rewards)


def _completions(rollouts: Sequence[RolloutBatch]) -> Metrics:
    lengths = np.concatenate([rollout.group.completion_lengths for rollout in rollouts])
    return {
        "completions": len(lengths),
        "completion_length_mean": float(np.mean(lengths)),
        "completion_length_min": int(lengths.min()),
        "completion_length_max": int(lengths.max()),
        "truncated": float(1 - np.mean(np.concatenate([rollout.finished for rollout in rollouts]))),
    }


def _costs(rollouts: Sequence[RolloutBatch], samples: Sequence[Metrics]) -> Metrics:
    """What sampling took, by the workers' own account. Outside clients give none."""

    def total(name: str) -> Any:
        return sum(sample.get(name, 0) for sample in samples)

    seconds, waiting = float(total("sampling_seconds")), float(total("waiting_seconds"))
    sampled = sum(len(rollout.group.completion_ids) for rollout in rollouts) + total("resampled_tokens")
    return {
        "sampling_seconds": seconds,
        "sampler_waiting_seconds": waiting,
        "sampler_waiting_share": waiting / max(seconds + waiting, 1e-9),
        "sampler_tokens_per_second": sampled / seconds if seconds else math.nan,
        **{field.name: total(field.name) for field in fields(WastedSamples)},
    }


def _numbers(sample: str | None) -> Metrics:
    """The numbers by name in a batch's sample, which may be any JSON when an outside client made it."""
    value = json.loads(sample or "{}")
    return (
        {name: item for name, item in value.items() if isinstance(item, int | float)} if isinstance(value, dict) else {}
    )


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if _missing(values) < len(values) else math.nan


def _std(values: np.ndarray) -> float:
    return float(np.nanstd(values)) if _missing(values) < len(values) else math.nan


def _missing(values: np.ndarray) -> int:
    return int(np.isnan(values).sum())


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: null says the same."""
    if isinstance(value, Mapping):
        return {name: _without_nan(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
