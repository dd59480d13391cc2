"""How long the stages of a run take, and when a wait is long enough to be reported."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import structlog

log = structlog.get_logger()

# Shorter waits are not reported.
_QUIET_SECONDS = 30.0
# A recurring wait is unusual if it is so many times as long as the median of the latest ones, without the shortest.
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
    """Decides when to report a wait: when it is long, and then each time it has become twice as long.

    recurring: whether every step has such a wait. Then only unusually long ones are reported. Waits of several threads
    that overlap count as one.
    """

    def __init__(self, *, recurring: bool = False) -> None:
        self._recurring = recurring
        self._latest = -math.inf  # when it was last asked
        self._seconds = 0.0
        self._reported = 0.0
        self._earlier: deque[float] = deque(maxlen=_REMEMBERED)

    def is_over(self, seconds: float) -> bool:
        """Whether to report the wait now. seconds: how long it has lasted."""
        now = time.monotonic()
        if now - seconds > self._latest:  # it began when no other lasted
            if self._recurring and self._seconds >= _NOTICED_SECONDS:
                self._earlier.append(self._seconds)
            self._reported = 0.0
        self._latest, self._seconds = now, seconds
        usual = median(self._earlier) if self._earlier else 0.0
        if seconds < max(_QUIET_SECONDS, _UNUSUAL * usual, 2 * self._reported):
            return False
        self._reported = seconds
        return True


def logged_wait(*, recurring: bool = False) -> Callable[[str, float], None]:
    """A callback for waits: logs the long ones, or of recurring ones those that are unusually long."""
    patience = Patience(recurring=recurring)

    def wait(reason: str, seconds: float) -> None:
        if patience.is_over(seconds):
            log.info("waiting", reason=reason, seconds=round(seconds, 1))

    return wait
