"""A process that another one started ends with it, even if that one is killed."""

import os
import signal
import threading
import time

PARENT_VARIABLE = "TANDEM_PARENT"


def child_environment() -> dict[str, str]:
    """The environment in which to start a child that is to end with this process."""
    return {**os.environ, PARENT_VARIABLE: str(os.getpid())}


def end_with_parent() -> None:
    """Sends this process SIGTERM once the process that started it is gone, if that one asked for it."""
    parent = os.environ.pop(PARENT_VARIABLE, None)  # not for this process's own children
    if parent:
        threading.Thread(target=_watch, args=(int(parent),), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
