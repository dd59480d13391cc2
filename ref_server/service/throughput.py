"""How fast the server works: its totals at regular times, so that a page that is opened later can draw the past."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import pairwise

from shared.api import ThroughputView

# Totals are kept this often for an hour, and more coarsely for a day: at most 361 of each.
SECONDS, COARSE_SECONDS = 10.0, 240.0
HOUR, DAY = 3600, 86400


class Throughput:
    """Used on the event loop.

    totals: counts that only grow, by the names of `ThroughputView`. clock: seconds; it never goes back.
    """

    def __init__(self, totals: Callable[[], Mapping[str, float]], clock: Callable[[], float] = time.monotonic) -> None:
        self._totals = totals
        self._clock = clock
        self._fine: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=int(HOUR / SECONDS) + 1)
        self._coarse: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=int(DAY / COARSE_SECONDS) + 1)

    async def watch(self) -> None:
        while True:
            self.note()
            await asyncio.sleep(SECONDS)

    def note(self) -> None:
        """Keeps the current totals."""
        latest = (self._clock(), self._totals())
        self._fine.append(latest)
        if not self._coarse or latest[0] - self._coarse[-1][0] >= COARSE_SECONDS:
            self._coarse.append(latest)

    def rates(self, seconds: float) -> ThroughputView:
        """Those of the last `seconds`, at most a day."""
        kept = [*self._fine]
        if seconds > HOUR:
            kept = [*self._coarse, *(each for each in kept[-1:] if each is not self._coarse[-1])]
        now, now_unix = self._clock(), time.time()
        spans = [(begin, end) for begin, end in pairwise(kept) if end[0] > now - seconds]
        names = ThroughputView.model_fields.keys() - {"times"}
        return ThroughputView(
            times=[round(now_unix - (now - at), 3) for _, (at, _) in spans],
            **{
                name: [round((end[name] - begin[name]) / (until - since), 6) for (since, begin), (until, end) in spans]
                for name in names
            },
        )
