"""Retries of requests to a server that does not answer or is busy."""

import random
import time
from collections.abc import Callable
from itertools import count
from typing import TypeVar

T = TypeVar("T")

# Called before each retry with the reason and the seconds waited so far. It may raise to give up.
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
    """Calls `work`, again while it fails with errors that may be temporary and patience lasts. Returns its result.

    reason: returns why an error is worth waiting for, None if it is not. Such an error is raised, as is the last one
    when patience runs out. patience: in seconds, None for no limit; it starts anew whenever the value of `progress` has
    changed since the last error. longest: the longest pause in seconds, unless the error has a `retry_after`. No pause
    ends after patience.
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
    """Returns the seconds to wait: what the server asks for, else an exponential backoff with jitter, so that clients
    that failed together do not retry together."""
    requested = _retry_after(error)
    if requested:  # 0 would ask without a pause
        return requested
    return random.uniform(0, min(_FIRST_PAUSE * 2 ** min(attempt, 30), longest))


def _retry_after(error: Exception) -> float | None:
    return getattr(error, "retry_after", None)
