"""Waiting for other threads and processes."""

import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """The first true value of `condition`; fails when there was none in `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"it has not come true within {seconds} s"
        time.sleep(0.01)
    return value
