"""Loops in the background, which must not end: a turn that fails is logged, and the loop goes on."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

log = structlog.get_logger()

# After so many failed turns in a row the server is not ready.
_TOLERATED = 2
_LONGEST_PAUSE = 60.0
_DOUBLINGS = 6  # these reach it; many more would be too large for a float


class BackgroundLoop:
    """The turns of one loop, which handles the errors that it expects. name: for the log and /readyz."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._failures = 0
        self._error = ""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Logs an error of the block instead of raising it."""
        try:
            yield
        except Exception as error:  # nobody else would see it
            self._failures += 1
            self._error = repr(error)[:300]
            log.error("a background loop failed", loop=self._name, again_in_seconds=self.pause, exc_info=True)
        else:
            self.reset()

    def reset(self) -> None:
        """Forgets the failures: the loop works, or is not needed any more."""
        self._failures = 0

    @property
    def pause(self) -> float:
        """Seconds to wait before the next turn, longer after each failure; 0 after none."""
        return min(_LONGEST_PAUSE, 2.0 ** min(self._failures, _DOUBLINGS)) if self._failures else 0.0

    @property
    def failure(self) -> str | None:
        """Why the server is not ready; None unless several turns in a row have failed."""
        if self._failures <= _TOLERATED:
            return None
        return f"{self._name} failed {self._failures} times in a row, at last with {self._error}; the log has more"
