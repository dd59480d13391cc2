"""metrics.jsonl, and the metrics that follow from the batches of a step."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from policy_trainer.processes.lifecycle.endings import write_failures
from shared.atomic_files import write_text
from shared.batch import Batch
from shared.client import Leased

Metrics = dict[str, Any]

# Of the numbers that a batch's `sample` says: counts and seconds. Larger ones are a client's mistake.
_LARGEST = 10**12


@dataclass
class WastedSamples:
    """Counts of what a worker drew or sampled and did not upload. Batches carry them; a step's metrics are their sums.

    dropped_prompts: problems whose prompt was too long or unusable. resampled_groups: groups without variance that were
    replaced. resampled_tokens: completion tokens of the replaced groups.
    """

    dropped_prompts: int = 0
    resampled_groups: int = 0
    resampled_tokens: int = 0


class MetricsFile:
    """metrics.jsonl: one line for each step, evaluation and warning. Every line is flushed when it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Raises RunFailed if the disk is full."""
        with write_failures(self._path):
            self._file.write(json.dumps(without_nan(record)) + "\n")
            self._file.flush()

    def close(self, *, failed: bool = False) -> None:
        with suppress(OSError):  # what could not be written is tried again, and was told before
            self._file.close()


def read_metrics(path: Path) -> list[Metrics]:
    """All records; none without a file. Lines that are no JSON object are skipped: a crash may cut off the last."""
    if not path.exists():
        return []
    records = []
    # Not splitlines: it also splits at characters that JSON allows inside a text, such as U+2028.
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def truncate_metrics(path: Path, step: int) -> None:
    """Drops the records after `step`, which the run resumes from. Step 0 is a new run and drops all of them."""
    if path.exists():
        kept = [record for record in read_metrics(path) if step and record.get("step", 0) <= step]
        write_text(path, "".join(json.dumps(record) + "\n" for record in kept))


def scoring_seconds(counts: Sequence[float]) -> float:
    """The working time of a run's servers between the first count and the last: each server's counter begins at 0."""
    return sum(now - before if now >= before else now for before, now in pairwise(counts))


def batch_metrics(leased: Sequence[Leased], version: int) -> Metrics:
    """The metrics that follow from a step's batches; docs/metrics.md explains each.

    version: the version of the weights that train on them.
    """
    rollouts = [lease.batch for lease in leased]
    samples = [_numbers(rollout) for rollout in rollouts]
    lags = [version - rollout.policy_version for rollout in rollouts]
    references = [int(rollout.reference_version) for rollout in rollouts if rollout.reference_version is not None]
    return {
        **_rewards(rollouts),
        **_completions(rollouts),
        **_costs(rollouts, samples),
        **_probes(samples),
        "staleness": float(np.mean(lags)),
        "staleness_max": max(lags),
        "reference_version_min": min(references, default=None),
        "reference_version_max": max(references, default=None),
        "redelivered": sum(lease.deliveries > 1 for lease in leased),
        "problems": [rollout.index for rollout in rollouts],
    }


def trained_lengths(rollout: Batch) -> np.ndarray:
    """int64 (G,), tokens of each completion that its loss_mask leaves: those that the model sampled."""
    lengths = rollout.group.completion_lengths
    if rollout.loss_mask is None:
        return lengths
    return np.add.reduceat(rollout.loss_mask, np.cumsum(lengths) - lengths, dtype=np.int64)


def next_index(leased: Sequence[Leased]) -> int:
    """One more than the highest problem index of a step's batches; 0 when no batch has an index."""
    return max((lease.batch.index for lease in leased if lease.batch.index is not None), default=-1) + 1


def _rewards(rollouts: Sequence[Batch]) -> Metrics:
    """Mean, standard deviation and number of NaN rewards: of the total reward and of each part."""
    names = sorted({name for rollout in rollouts for name in rollout.reward_parts})
    parts = {name: np.concatenate([rollout.reward_parts.get(name, []) for rollout in rollouts]) for name in names}
    rewards = {"": np.concatenate([_trained_rewards(rollout) for rollout in rollouts])}
    rewards |= {f"/{name}": part for name, part in parts.items()}
    return {
        f"{name}{suffix}": statistic(values)
        for name, statistic in (("reward", _mean), ("reward_std", _std), ("unrewarded", _count_nan))
        for suffix, values in rewards.items()
    }


def _trained_rewards(rollout: Batch) -> np.ndarray:
    """(G,) rewards; NaN where a completion or one of its steps has no reward, so that the completion does not train."""
    return rollout.rewards if rollout.steps is None else np.where(rollout.steps.unrewarded, np.nan, rollout.rewards)


def _completions(rollouts: Sequence[Batch]) -> Metrics:
    lengths = np.concatenate([trained_lengths(rollout) for rollout in rollouts])
    finished = np.concatenate([rollout.finished for rollout in rollouts])
    ended = lengths[finished]
    prompts = sum(rollout.group.size * len(rollout.group.prompt_ids) for rollout in rollouts)
    return {
        "completions": len(lengths),
        "completion_length_mean": float(np.mean(lengths)),
        "completion_length_min": int(lengths.min()),
        "completion_length_max": int(lengths.max()),
        "finished_length_mean": float(np.mean(ended)) if len(ended) else None,
        "finished_length_min": int(ended.min()) if len(ended) else None,
        "finished_length_max": int(ended.max()) if len(ended) else None,
        "prompt_length_mean": prompts / len(lengths),
        "truncated": float(1 - np.mean(finished)),
    }


def _costs(rollouts: Sequence[Batch], samples: Sequence[Metrics]) -> Metrics:
    """Sampling times and wasted samples, as the workers reported them. Outside clients report nothing."""

    def total(name: str) -> Any:
        return sum(sample.get(name, 0) for sample in samples)

    seconds, waiting = float(total("sampling_seconds")), float(total("waiting_seconds"))
    sampled = sum(int(trained_lengths(rollout).sum()) for rollout in rollouts) + total("resampled_tokens")
    return {
        "sampling_seconds": seconds,
        "judging_seconds": float(total("judging_seconds")),
        "sampler_waiting_seconds": waiting,
        "sampler_waiting_share": waiting / max(seconds + waiting, 1e-9),
        "sampler_tokens_per_second": sampled / seconds if seconds else math.nan,
        **{field.name: total(field.name) for field in fields(WastedSamples)},
    }


def _probes(samples: Sequence[Metrics]) -> Metrics:
    """How far the samplers' log-probs were from the learner's after their latest update; None where none compared."""
    means = [sample["probe_logp_difference"] for sample in samples if "probe_logp_difference" in sample]
    largest = [sample["probe_logp_difference_max"] for sample in samples if "probe_logp_difference_max" in sample]
    return {
        "probe_logp_difference": float(np.mean(means)) if means else None,
        "probe_logp_difference_max": max(largest, default=None),
    }


def sample_fields(batch: Batch) -> dict[str, Any]:
    """What the worker says of a batch in its `sample`. An outside client may have put any JSON there."""
    value = json.loads(batch.sample or "{}")
    return value if isinstance(value, dict) else {}


def _numbers(batch: Batch) -> Metrics:
    items = sample_fields(batch).items()
    return {name: item for name, item in items if isinstance(item, int | float) and 0 <= item <= _LARGEST}


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if _count_nan(values) < len(values) else math.nan


def _std(values: np.ndarray) -> float:
    return float(np.nanstd(values)) if _count_nan(values) < len(values) else math.nan


def _count_nan(values: np.ndarray) -> int:
    return int(np.isnan(values).sum())


def without_nan(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, Mapping):
        return {name: without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
