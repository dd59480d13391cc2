"""The points of a curve, few enough for a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from policy_trainer.report.recorded import number
from policy_trainer.reporting.metrics import Metrics

# A panel has hardly more pixels.
_POINTS = 240


@dataclass(frozen=True)
class Series:
    """A curve. xs, ys: (N,) float64, NaN in ys is a gap. low, high: (N,), what surrounds it: an interval, or the range
    of the steps that a point stands for; empty where nothing does. last: the newest number of the metric."""

    name: str
    xs: np.ndarray
    ys: np.ndarray
    low: np.ndarray
    high: np.ndarray
    last: float


def series_of(
    records: Sequence[Metrics], name: str, places: Mapping[int, float] | None = None, *, interval: bool = False
) -> Series | None:
    """None where no record has a number. places: step -> place on the x axis; the steps themselves without it.

    interval: `low` and `high` of the records surround the curve.
    """
    placed = [record for record in records if places is None or record["step"] in places]
    xs = np.array([record["step"] if places is None else places[record["step"]] for record in placed], dtype=np.float64)
    ys = np.array([number(record, name) for record in placed])
    known = np.isfinite(ys)
    if not known.any():
        return None
    last = float(ys[known][-1])
    if interval:
        low, high = (np.array([number(record, end) for record in placed]) for end in ("low", "high"))
        return Series(name, xs, ys, low, high, last)
    if len(xs) > _POINTS:
        return Series(name, *_thinned(xs[known], ys[known]), last)
    return Series(name, xs, ys, np.array([]), np.array([]), last)


def _thinned(xs: np.ndarray, ys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Means of neighbouring points, with the least and the largest of them."""
    parts = min(_POINTS, len(xs))
    places, values = np.array_split(xs, parts), np.array_split(ys, parts)
    means, lows, highs = (np.array([f(part) for part in values]) for f in (np.mean, np.min, np.max))
    return np.array([part.mean() for part in places]), means, lows, highs
