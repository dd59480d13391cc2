"""How long the stages of a run take, and when a wait is long enough to be reported."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

log = structlog.get_logger()

# Shorter waits are not reported.
_QUIET_SECONDS = 3.0


class Stopwatch:
    """seconds: by stage, in the order of their beginnings.

    ```
    with stopwatch("learn"):
        learner.step(batches)
    ```
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Adds the seconds of the block to its stage, also when it raises."""
        self.seconds.setdefault(stage, 0.0)
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] += time.monotonic() - began


class Patience:
    """Decides when to report a wait: after _QUIET_SECONDS, and then each time it has become twice as long."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._next = _QUIET_SECONDS

    def is_over(self, seconds: float) -> bool:
        """Whether to report the wait now. seconds: how long it has lasted; fewer than last time means a new wait."""
        if seconds < self._seconds:
            self._next = _QUIET_SECONDS
        self._seconds = seconds
        if seconds < self._next:
            return False
        self._next = 2 * seconds
        return True


def logged_wait() -> Callable[[str, float], None]:
    """A callback for waits: logs the long ones."""
    patience = Patience()

    def wait(reason: str, seconds: float) -> None:
        if patience.is_over(seconds):
            log.info("waiting", reason=reason, seconds=round(seconds, 1))

    return wait
