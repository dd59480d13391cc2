"""Background loops, which must not end: an iteration that fails is logged, and the loop goes on."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from shared.errors import brief

log = structlog.get_logger()

# With more failed iterations in a row than this the server is not ready.
_TOLERATED = 2
_LONGEST_PAUSE = 60.0
_DOUBLINGS = 6  # these reach it; many more would be too large for a float


class BackgroundLoop:
    """Catches and counts unexpected errors of one loop, for the log and /readyz, where it is called `name`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._failures = 0
        self._error = ""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A context manager for one iteration: logs an error of its block instead of raising it."""
        try:
            yield
        except Exception as error:  # or it would be lost
            self._failures += 1
            self._error = brief(error)
            log.error("a background loop failed", loop=self._name, again_in_seconds=self.pause, exc_info=True)
        else:
            self.reset()

    def reset(self) -> None:
        """Forgets the failures: the loop works again, or is no longer needed."""
        self._failures = 0

    @property
    def pause(self) -> float:
        """Seconds to wait before the next iteration: 0 after a success, longer after each failure in a row."""
        return min(_LONGEST_PAUSE, 2.0 ** min(self._failures, _DOUBLINGS)) if self._failures else 0.0

    @property
    def failure(self) -> str | None:
        """Why the server is not ready; None unless several iterations in a row have failed."""
        if self._failures <= _TOLERATED:
            return None
        return f"{self._name} failed {self._failures} times in a row, most recently with {self._error}; see the log"
