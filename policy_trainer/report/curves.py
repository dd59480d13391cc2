"""Pictures of a page, with the keys of their lines."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from policy_trainer.report.drawing import COLOURS, DASHES, draw
from policy_trainer.report.panels import PANELS, Panel
from policy_trainer.report.recorded import RecordedRun
from policy_trainer.report.series import Series, series_of
from policy_trainer.reporting.metrics import Metrics


@dataclass(frozen=True)
class Key:
    """What stands beside a picture for one of its lines. last: its newest number."""

    name: str
    last: float
    colour: int
    dash: str


@dataclass(frozen=True)
class Picture:
    title: str
    unit: str
    healthy: str
    svg: Markup
    keys: tuple[Key, ...]


def curves_of(run: RecordedRun) -> list[Picture]:
    """One picture for each panel that the run has numbers of."""
    return [_picture(panel, panel.title, lines, x="step") for panel in PANELS if (lines := _lines_of(run, panel))]


def laid_over(
    runs: Sequence[tuple[str, RecordedRun]], x: str, places: Sequence[Mapping[int, float] | None]
) -> list[Picture]:
    """One picture for each metric, with a line for each run of this name. x, places: the axis, of each run."""
    pictures = []
    for panel, name, title in _metrics_of([run for _, run in runs]):
        lines = [
            (label, found)
            for (label, run), at in zip(runs, places, strict=True)
            if (found := series_of(_records(run, panel.kind), name, at))
        ]
        if lines:
            pictures.append(_picture(panel, title, lines, x=x))
    return pictures


def last_values(runs: Sequence[RecordedRun]) -> list[tuple[str, list[float]]]:
    """Metric -> its newest number in each run."""
    rows = []
    for panel, name, title in _metrics_of(runs):
        found = [series_of(_records(run, panel.kind), name) for run in runs]
        if any(found):
            rows.append((title, [item.last if item else math.nan for item in found]))
    return rows


def _metrics_of(runs: Sequence[RecordedRun]) -> list[tuple[Panel, str, str]]:
    """The first metric of each panel, and all that its prefixes stand for, each with a title."""
    found = []
    for panel in PANELS:
        records = [record for run in runs for record in _records(run, panel.kind)[:1]]
        found.append((panel, panel.first, panel.title))
        found += [
            (panel, name, f"{panel.title}: {name}") for name in _expanded(records, panel.steps[1:]) if "/" in name
        ]
    return found


def _lines_of(run: RecordedRun, panel: Panel) -> list[tuple[str, Series]]:
    steps = [(name, series_of(run.steps, name)) for name in _expanded(run.steps, panel.steps)]
    held_out = [
        (f"{name}, held out" if panel.steps else name, series_of(run.evaluations, name, interval=panel.interval))
        for name in panel.evaluations
    ]
    return [(name, found) for name, found in (*steps, *held_out) if found]


def _expanded(records: Sequence[Metrics], names: Sequence[str]) -> list[str]:
    """The names, with those that a prefix stands for in its place."""
    known = dict.fromkeys(name for record in records[:1] for name in record)
    return [
        name
        for wanted in names
        for name in ([*filter(lambda one: one.startswith(wanted), known)] if wanted.endswith("/") else [wanted])
    ]


def _records(run: RecordedRun, kind: str) -> Sequence[Metrics]:
    return run.steps if kind == "step" else run.evaluations


def _picture(panel: Panel, title: str, lines: Sequence[tuple[str, Series]], x: str) -> Picture:
    keys = tuple(
        Key(label, line.last, place % COLOURS, DASHES[place // COLOURS % len(DASHES)])
        for place, (label, line) in enumerate(lines)
    )
    svg = draw([line for _, line in lines], name=f"{title} {x}", x=x, low=panel.low, high=panel.high)
    return Picture(title, panel.unit, panel.healthy, svg, keys)
