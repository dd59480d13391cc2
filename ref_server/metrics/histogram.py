"""How long things took, counted by upper bounds."""

import threading
from bisect import bisect_left
from collections.abc import Sequence

# Seconds. What is quick is told apart finely; long polls and long forwards still find a place.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Histogram:
    """Values counted by the least of the rising `bounds` that they do not exceed. Safe to use from any thread."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        place = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[place] += 1
            self._sum += value

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """As Prometheus wants it: how many values lie at or below each bound and `+Inf`, and the sum of all."""
        with self._lock:
            counts, total = self._counts.copy(), self._sum
        names = [*map(repr, map(float, self._bounds)), "+Inf"]
        below = 0
        buckets: list[tuple[str, float]] = []
        for name, count in zip(names, counts, strict=True):
            below += count
            buckets.append((name, below))
        return buckets, total
