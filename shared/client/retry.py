"""Asks a server again while it does not answer, or not now."""

import random
import time
from collections.abc import Callable
from itertools import count
from typing import TypeVar

T = TypeVar("T")

# Called before each retry with the reason and the seconds waited so far. May raise to give up.
OnWait = Callable[[str, float], None]

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0


def retried(
    work: Callable[[], T],
    reason: Callable[[Exception], str | None],
    on_wait: OnWait | None,
    *,
    patience: float | None = None,
    longest: float = _LONGEST_PAUSE,
    progress: Callable[[], int] = lambda: 0,
) -> T:
    """The result of `work`, which is repeated while it raises what may pass and patience lasts.

    reason: says of an error why to wait; None if waiting does not help. Other errors, and the last one, are raised.
    patience: in seconds, None without end; it starts again when `progress` has changed since the last error. longest:
    seconds of a pause, unless the error has a `retry_after`. No pause ends after patience.
    """
    began, before = time.monotonic(), progress()
    for attempt in count():
        try:
            return work()
        except Exception as error:
            if (why := reason(error)) is None:
                raise
            if (now := progress()) != before:
                began, before = time.monotonic(), now
            waited = time.monotonic() - began
            if patience is not None and waited + (_retry_after(error) or 0.0) >= patience:
                raise
            seconds = pause(error, attempt, longest)
            if patience is not None:
                seconds = min(seconds, patience - waited)
        if on_wait:
            on_wait(why, waited)
        time.sleep(seconds)
    raise AssertionError("the loop has no end")


def pause(error: Exception, attempt: int, longest: float) -> float:
    """Seconds: what the server asks for, else at random, so that clients that failed together do not return
    together."""
    requested = _retry_after(error)
    if requested:  # 0 would ask without a pause
        return requested
    return random.uniform(0, min(_FIRST_PAUSE * 2 ** min(attempt, 30), longest))


def _retry_after(error: Exception) -> float | None:
    return getattr(error, "retry_after", None)
