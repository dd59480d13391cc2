"""Plots a run's learning curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

Records = Sequence[Mapping[str, Any]]


def plot_curves(records: Records, path: Path) -> None:
    """Draws rewards, held-out accuracy, completion lengths, KL, entropy and clip ratio over the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [record for record in records if record["kind"] == "step"]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    names = list(dict.fromkeys(name for record in steps for name in record))
    figure = Figure(figsize=(15, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3)
    rewards = [name for name in names if name == "reward" or name.startswith("reward/")]
    lengths = ["completion_length_mean", "completion_length_min", "completion_length_max"]
    _draw(axes[0, 0], steps, rewards, "reward, mean of the sampled completions")
    if any(record.get("accuracy") is not None for record in evaluations) or not evaluations:
        _draw(axes[0, 1], evaluations, ["accuracy"], "accuracy on held-out problems, greedy", marker="o")
        axes[0, 1].set_ylim(0, 1.02)
    else:  # no problem has a gold answer
        _draw(axes[0, 1], evaluations, ["reward"], "reward on held-out problems, greedy", marker="o")
    _draw(axes[0, 2], steps, lengths, "tokens of a completion")
    _draw(axes[1, 0], steps, ["kl"], "KL to the reference, nats a token")
    _draw(axes[1, 1], steps, ["entropy"], "entropy of the policy, nats a token")
    _draw(axes[1, 2], steps, ["clip_ratio"], "share of tokens whose ratio is clipped")
    figure.savefig(path, dpi=100)


def _draw(axis: Axes, records: Records, names: Sequence[str], title: str, **style: Any) -> None:
    """One line for each metric, with a gap where a record has no number."""
    steps = [record["step"] for record in records]
    for name in names:
        values = [record.get(name) for record in records]
        axis.plot(steps, [float("nan") if value is None else value for value in values], label=name, **style)
    if len(names) > 1:
        axis.legend()
    axis.set_title(title)
    axis.set_xlabel("step")
    axis.grid(alpha=0.3)
