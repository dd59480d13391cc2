"""Leased batches that wait for training, and how many more to lease."""

import threading
from collections import deque
from collections.abc import Iterable, Sequence

from shared.client import Leased


class Stock:
    """Holds what the step in hand still needs, and up to `ahead` batches more. Threads may share it."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._needed = 0
        self._waiting: deque[Leased] = deque()
        self._changed = threading.Condition()

    @property
    def full(self) -> bool:
        with self._changed:
            return self._lacking <= 0

    def lacking(self, timeout: float) -> int:
        """How many more to lease. Waits until there is room, so many seconds; 0 if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._lacking > 0, timeout)
            return max(0, self._lacking)

    def add(self, batches: Iterable[Leased]) -> None:
        with self._changed:
            self._waiting.extend(batches)
            self._changed.notify_all()

    def put_back(self, batches: Sequence[Leased]) -> None:
        """Puts batches that were taken back to the front, in this order."""
        with self._changed:
            self._waiting.extendleft(reversed(batches))
            self._changed.notify_all()

    def take(self, needed: int, timeout: float) -> Leased | None:
        """The batch that has waited longest; None if none came within so many seconds.

        needed: how many batches the step still needs, this one included.
        """
        with self._changed:
            self._needed = needed
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._waiting, timeout):
                return None
            self._needed -= 1
            return self._waiting.popleft()

    @property
    def _lacking(self) -> int:
        return self._needed + self._ahead - len(self._waiting)
