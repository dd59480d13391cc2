"""How long the stages of a run take, and when a wait is long enough to be reported."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import structlog

log = structlog.get_logger()

# Shorter waits are not reported.
_QUIET_SECONDS = 30.0
# A wait is unusual if it is so many times as long as the median of the latest earlier ones, without the shortest.
_UNUSUAL = 3.0
_REMEMBERED = 20
_NOTICED_SECONDS = 1.0


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
    """Decides when to report a wait: when it is unusually long, and then each time it has become twice as long."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._reported = 0.0
        self._earlier: deque[float] = deque(maxlen=_REMEMBERED)

    def is_over(self, seconds: float) -> bool:
        """Whether to report the wait now. seconds: how long it has lasted; fewer than last time means a new wait."""
        if seconds < self._seconds:
            if self._seconds >= _NOTICED_SECONDS:
                self._earlier.append(self._seconds)
            self._reported = 0.0
        self._seconds = seconds
        usual = median(self._earlier) if self._earlier else 0.0
        if seconds < max(_QUIET_SECONDS, _UNUSUAL * usual, 2 * self._reported):
            return False
        self._reported = seconds
        return True


def logged_wait() -> Callable[[str, float], None]:
    """A callback for waits: logs the long ones."""
    patience = Patience()

    def wait(reason: str, seconds: float) -> None:
        if patience.is_over(seconds):
            log.info("waiting", reason=reason, seconds=round(seconds, 1))

    return wait
