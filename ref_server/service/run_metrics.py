"""What the routes tell of the metrics of runs: lists of them, and columns of numbers."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from pydantic_core import from_json

from ref_server.queue.run_metrics import Curve, Point
from shared.api import RunPage, RunSummary
from shared.batch import LINEAGE

# When the last run of a page was updated, its lineage and its name.
CURSOR = rf"[0-9]{{1,12}}(\.[0-9]{{1,9}})?:({LINEAGE})?:.{{1,200}}"


def summarise(curves: Iterable[Curve]) -> list[RunSummary]:
    """One for each lineage, the latest updated first."""

    def key(curve: Curve) -> tuple[str, str]:
        return curve.run, curve.lineage

    found = [_summary(list(own)) for _, own in groupby(sorted(curves, key=key), key)]
    return sorted(found, key=_order)


def page_of_runs(runs: Sequence[RunSummary], limit: int, cursor: str | None) -> RunPage:
    """The first runs after the cursor. One that is updated between two pages comes first, and so on no later page."""
    if cursor is not None:
        at, lineage, run = cursor.split(":", 2)
        runs = [each for each in runs if _order(each) > (-float(at), run, lineage)]
    last = runs[limit - 1] if len(runs) > limit else None
    next_cursor = None if last is None else f"{last.updated_at!r}:{last.lineage}:{last.run}"
    return RunPage(runs=[*runs[:limit]], next_cursor=next_cursor)


def is_cursor(text: str) -> bool:
    return re.fullmatch(CURSOR, text, re.DOTALL) is not None


def columns(points: Sequence[Point], names: Sequence[str]) -> dict[str, list[int | float | None]]:
    """By name a number for each point, None where it has none. Without names: of all that are a number somewhere."""
    rows = [dict(_numbers(_parsed(point.record))) for point in points]
    wanted = names or dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in wanted}


def _summary(curves: Sequence[Curve]) -> RunSummary:
    return RunSummary(
        run=curves[0].run,
        lineage=curves[0].lineage,
        records=sum(curve.records for curve in curves),
        step=max(curve.step for curve in curves),
        first_at=min(curve.first_at for curve in curves),
        updated_at=max(curve.updated_at for curve in curves),
    )


def _order(summary: RunSummary) -> tuple[float, str, str]:
    return -summary.updated_at, summary.run, summary.lineage


def _parsed(record: str) -> Mapping[str, Any]:
    """Empty for a damaged record: the others can be shown."""
    try:
        parsed = from_json(record)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float]]:
    """The numbers of a record but its step, those of an object in it as `rewards/tags`."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and f"{prefix}{name}" != "step":
            yield f"{prefix}{name}", int(value) if isinstance(value, bool) else value
