"""Who reads which version: it stays until they are done."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.api import WeightsName

# A reader that asks for one file after the other, or again after its connection broke, is still reading for so long.
PAUSE_SECONDS = 10.0


class Readers:
    """Any thread may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._reading: dict[WeightsName, int] = {}
        self._seen: dict[WeightsName, float] = {}

    def saw(self, version: WeightsName) -> None:
        """Somebody asked for a part of it."""
        with self._lock:
            self._seen[version] = self._clock()

    @contextmanager
    def reading(self, version: WeightsName) -> Iterator[None]:
        """Around a long read."""
        with self._lock:
            self._reading[version] = self._reading.get(version, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._reading[version] -= 1
                self._seen[version] = self._clock()
                if not self._reading[version]:
                    del self._reading[version]

    def now(self) -> set[WeightsName]:
        """The versions that are being read."""
        with self._lock:
            begun = self._clock() - PAUSE_SECONDS
            self._seen = {version: seen for version, seen in self._seen.items() if seen > begun}
            return {*self._reading, *self._seen}
