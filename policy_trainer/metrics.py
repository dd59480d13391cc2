"""What a step left behind, as one line of JSON; and the picture of the curves."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shared.client import Leased


class MetricsFile:
    """metrics.jsonl: a line for each step and each evaluation, appended and flushed at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(_without_nan(record)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records; a last line that a crash cut off is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def truncate_metrics(path: Path, step: int) -> None:
    """Drops what an abandoned lineage wrote beyond the step that is resumed from."""
    if path.exists():
        kept = [record for record in read_metrics(path) if record["step"] <= step]
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        temporary.replace(path)


def batch_metrics(leased: Sequence[Leased], version: int) -> dict[str, Any]:
    """Means over the completions of a step: rewards and their parts, lengths, truncation; and staleness in steps."""
    rollouts = [lease.rollout for lease in leased]
    samples = [_numbers(rollout.sample) for rollout in rollouts]
    rewards = np.concatenate([rollout.rewards for rollout in rollouts])
    names = sorted({name for rollout in rollouts for name in rollout.reward_parts})
    parts = {name: np.concatenate([rollout.reward_parts.get(name, []) for rollout in rollouts]) for name in names}
    lags = [version - rollout.policy_version for rollout in rollouts]
    return {
        "reward": _mean(rewards),
        "reward_std": float(np.nanstd(rewards)) if not np.isnan(rewards).all() else math.nan,
        **{f"reward/{name}": _mean(part) for name, part in parts.items()},
        "unjudged": int(np.isnan(rewards).sum()),
        "completion_tokens": float(np.mean(np.concatenate([r.group.completion_lengths for r in rollouts]))),
        "truncated": float(1 - np.mean(np.concatenate([r.finished for r in rollouts]))),
        "staleness": float(np.mean(lags)),
        "staleness_max": max(lags),
        "redelivered": sum(lease.deliveries > 1 for lease in leased),
        "sampling_seconds": sum(sample.get("sampling_seconds", 0.0) for sample in samples),
        "sampler_waiting_seconds": sum(sample.get("waiting_seconds", 0.0) for sample in samples),
        "dropped_prompts": sum(sample.get("dropped_prompts", 0) for sample in samples),
        "problems": [sample.get("index") for sample in samples],
        "next_index": max((sample.get("index", -1) for sample in samples), default=-1) + 1,
    }


def plot_curves(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Reward, held-out accuracy, KL and waiting over the steps, as a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [record for record in records if record["kind"] == "step"]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    x = [record["step"] for record in steps]
    for name in [key for key in (steps[0] if steps else {}) if key == "reward" or key.startswith("reward/")]:
        axes[0, 0].plot(x, [record.get(name) for record in steps], label=name)
    axes[0, 0].set_title("reward, mean of the sampled completions")
    if steps:
        axes[0, 0].legend()
    axes[0, 1].plot([r["step"] for r in evaluations], [r["accuracy"] for r in evaluations], marker="o")
    axes[0, 1].set_ylim(0, 1.02)
    axes[0, 1].set_title("accuracy on held-out problems, greedy")
    axes[1, 0].plot(x, [record["kl"] for record in steps])
    axes[1, 0].set_title("KL to the reference, nats a token")
    axes[1, 1].plot(x, [record["completion_tokens"] for record in steps])
    axes[1, 1].set_title("tokens of a completion")
    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _numbers(sample: str | None) -> dict[str, Any]:
    """The numbers by name in a batch's sample, which may be any JSON when an outside client made it."""
    value = json.loads(sample or "{}")
    return (
        {name: item for name, item in value.items() if isinstance(item, int | float)} if isinstance(value, dict) else {}
    )


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if len(values) and not np.isnan(values).all() else math.nan


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: null says the same."""
    if isinstance(value, Mapping):
        return {name: _without_nan(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
