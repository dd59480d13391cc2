"""Writes the tables of docs/metrics.md, and shared/viewer/ranges.js: `.venv/bin/python -m tools.metrics_page`."""

import json
import math
import re
from pathlib import Path

from policy_trainer.metrics import METRICS, STEP_METRICS, Metric
from policy_trainer.reporting.report.story import BUSY, CLEAR

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "metrics.md"
SCRIPT = ROOT / "shared" / "viewer" / "ranges.js"
_HEAD = "// Metrics in the order of their plots, written by tools/metrics_page.py from policy_trainer/metrics.py.\n\n"
_BOUNDS = f"// From report/story.py.\nexport const BUSY = {BUSY};\nexport const CLEAR = {CLEAR};\n"
# A row of the page's first table, and what begins the table of all names.
_FIRST = re.compile(r"^(\| \[`(\w+)`\][^|]*\| )[^|]*( \|[^|]*\|)$", re.MULTILINE)
_NAMES = "| kind | name | meaning | unit | healthy |\n|---|---|---|---|---|\n"
_KINDS = ("all", "step", "evaluation", "health")


def written(page: str) -> str:
    """The page, with the ranges of the first table and all rows of the table of names rewritten."""
    page = _FIRST.sub(lambda row: f"{row[1]}{STEP_METRICS[row[2]].healthy}{row[3]}", page)
    above, _, below = page.partition(_NAMES)
    rows = sorted((metric for metric in METRICS if metric.meaning), key=_place)
    return above + _NAMES + "".join(f"{_row(metric)}\n" for metric in rows) + below[below.index("\n\n") + 1 :]


def _place(metric: Metric) -> tuple[int, bool]:
    return _KINDS.index(metric.kind), bool(metric.when)


def _row(metric: Metric) -> str:
    """Ranges that the trainer watches are bold. Metrics with a title have an anchor."""
    anchor = metric.name if metric.kind == "step" else f"{metric.kind}-{metric.name}"
    healthy = f"**{metric.healthy}**" if metric.watched else metric.healthy
    meaning = _meaning(metric).replace("|", "\\|")
    meaning = f'<a id="{anchor}"></a>{meaning}' if metric.title else meaning
    kind = ", ".join(filter(None, (metric.kind, metric.when)))
    cells = (kind, f"`{metric.name}`", meaning, metric.unit, healthy)
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def _meaning(metric: Metric) -> str:
    if metric.name != "each_update":
        return metric.meaning
    *names, last = (f"`{each.name}`" for each in METRICS if each.each_update)
    return f"{metric.meaning} {', '.join(names)} and {last}"


def script() -> str:
    rows = "".join(f"  {json.dumps(_fields(metric), ensure_ascii=False)},\n" for metric in METRICS if metric.title)
    return f"{_HEAD}export const METRICS = [\n{rows}];\n\n{_BOUNDS}"


def _fields(metric: Metric) -> dict[str, str | float | None]:
    low, high = (bound if math.isfinite(bound) else None for bound in (metric.low, metric.high))
    names = ("kind", "name", "title", "unit", "healthy", "better")
    return {name: getattr(metric, name) for name in names} | {"low": low, "high": high, "about": _about(metric)}


def _about(metric: Metric) -> str:
    """What the number means, and what to do outside its range."""
    meaning = metric.meaning.replace("`", "")
    below = metric.too_low and f"Below its range, {metric.too_low}"
    above = metric.too_high and f"Above its range, {metric.too_high}"
    return " ".join(f"{text}." for text in (meaning[:1].upper() + meaning[1:], below, above) if text)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    SCRIPT.write_text(script(), encoding="utf-8")
