"""A child process ends with its parent, even when the parent is killed."""

import os
import signal
import threading
import time
from collections.abc import Callable

PARENT_VARIABLE = "TANDEM_PARENT"


def child_environment() -> dict[str, str]:
    """The environment for a child process that must end with this one."""
    return {**os.environ, PARENT_VARIABLE: str(os.getpid())}


def end_with_parent() -> None:
    """Sends this process SIGTERM once its parent is gone, if the parent used `child_environment`."""
    parent = os.environ.pop(PARENT_VARIABLE, None)  # this process's own children must not inherit it
    if parent:
        when_parent_is_gone(int(parent), lambda: os.kill(os.getpid(), signal.SIGTERM))


def when_parent_is_gone(parent: int, act: Callable[[], None]) -> None:
    """Calls `act` in a thread of its own once this process has another parent than this one."""
    threading.Thread(target=_watch, args=(parent, act), name="parent-watch", daemon=True).start()


def _watch(parent: int, act: Callable[[], None]) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    act()
