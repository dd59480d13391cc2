"""Writes rows of docs/metrics.md, and shared/viewer/ranges.js: `.venv/bin/python -m tools.metrics_page`."""

import json
import math
import re
from pathlib import Path

from policy_trainer.report.story import BUSY, CLEAR
from policy_trainer.reporting.ranges import METRICS, STEP_METRICS, Metric

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "metrics.md"
SCRIPT = ROOT / "shared" / "viewer" / "ranges.js"
_HEAD = "// Metrics in the order of their plots, written by tools/metrics_page.py from reporting/ranges.py.\n\n"
_BOUNDS = f"// From report/story.py.\nexport const BUSY = {BUSY};\nexport const CLEAR = {CLEAR};\n"
# A row of the page's first table, and one of the table of all names.
_FIRST = re.compile(r"^(\| \[`(\w+)`\][^|]*\| )[^|]*( \|[^|]*\|)$", re.MULTILINE)
_ROW = re.compile(r"^\| (step|evaluation) \| `(\w+)` \|.*$", re.MULTILINE)


def written(page: str) -> str:
    """The page, with the rows of these metrics rewritten."""
    rows = {(metric.kind, metric.name): _row(metric) for metric in METRICS if metric.meaning}
    page = _FIRST.sub(lambda row: f"{row[1]}{STEP_METRICS[row[2]].healthy}{row[3]}", page)
    return _ROW.sub(lambda row: rows.get((row[1], row[2]), row[0]), page)


def _row(metric: Metric) -> str:
    """Ranges that the trainer watches are bold."""
    anchor = metric.name if metric.kind == "step" else f"{metric.kind}-{metric.name}"
    healthy = f"**{metric.healthy}**" if metric.too_low or metric.too_high else metric.healthy
    meaning = metric.meaning.replace("|", "\\|")
    cells = (metric.kind, f"`{metric.name}`", f'<a id="{anchor}"></a>{meaning}', metric.unit, healthy)
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def script() -> str:
    rows = "".join(f"  {json.dumps(_fields(metric), ensure_ascii=False)},\n" for metric in METRICS)
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
