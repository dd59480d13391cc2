"""The picture of a run's curves, for its model card."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from policy_trainer.reporting.metrics import Metrics
from policy_trainer.reporting.report.run import RecordedRun, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Each gives one panel: its first metric with values at two or more steps.
_OF_EVALUATIONS: Mapping[str, str] = {
    "accuracy": "held-out accuracy",
    "reward": "held-out reward",
    "eval_loss": "held-out loss",
}
_OF_STEPS: Mapping[str, str] = {"reward": "reward", "loss": "loss"}
_KL: Mapping[str, str] = {"kl": "KL to the reference"}


def draw_curves(run: RecordedRun, path: Path) -> bool:
    """Writes a PNG. Returns False without writing if no curve has two points.

    Raises ImportError without matplotlib.
    """
    evaluations, steps = run.evaluations, run.steps
    pairs = ((evaluations, _OF_EVALUATIONS), (steps, _OF_STEPS), (steps, _KL))
    panels = [(records, *chosen) for records, names in pairs if (chosen := _choose(records, names))]
    if not panels:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(panels), 2.8), layout="constrained")
    for axes, (records, name, title) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, records, name)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return True


def _choose(records: Sequence[Metrics], names: Mapping[str, str]) -> tuple[str, str] | None:
    """The first metric that has values at two or more steps, with its title."""
    for name, title in names.items():
        if len({record["step"] for record in _having(records, name)}) > 1:
            return name, title
    return None


def _having(records: Sequence[Metrics], name: str) -> list[Metrics]:
    return [record for record in records if math.isfinite(number(record, name))]


def _draw_panel(axes: "Axes", records: Sequence[Metrics], name: str) -> None:
    """A line for each decoding of evaluations, with the 95% interval of an accuracy."""
    records = _having(records, name)
    decodings = dict.fromkeys(record.get("decoding") for record in records)
    for decoding in decodings:
        line = [record for record in records if record.get("decoding") == decoding]
        steps = [record["step"] for record in line]
        values, low, high = ([number(record, key) for record in line] for key in (name, "low", "high"))
        axes.plot(steps, values, marker="." if len(line) < 50 else "", label=decoding)
        if name == "accuracy":
            axes.fill_between(steps, low, high, alpha=0.2)
    if len(decodings) > 1:
        axes.legend()
