"""The process itself: ending with its parent, even a killed one; memory, Python's and glibc's."""

import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

PARENT_VARIABLE = "TANDEM_PARENT"

# Parameters of mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM = 128 * 2**10  # glibc's own


def child_environment() -> dict[str, str]:
    """The environment for a child process that must end with this one."""
    return {**os.environ, PARENT_VARIABLE: str(os.getpid())}


def end_with_parent() -> None:
    """Sends this process SIGTERM once its parent is gone, if the parent used `child_environment`."""
    parent = os.environ.pop(PARENT_VARIABLE, None)  # this process's own children must not inherit it
    if parent:
        when_parent_is_gone(int(parent), lambda: os.kill(os.getpid(), signal.SIGTERM))


def when_parent_is_gone(parent: int, act: Callable[[], None]) -> None:
    """Calls `act` in a new thread once the parent of this process is no longer `parent`."""
    threading.Thread(target=_watch, args=(parent, act), name="parent-watch", daemon=True).start()


def _watch(parent: int, act: Callable[[], None]) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    act()


@contextmanager
def quick_imports() -> Generator[None]:
    """Pauses the garbage collector, so that PyTorch and transformers import in a quarter less time: imports make no
    garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# Bytes that `keep_freed_memory` keeps at most.
KEPT_MEMORY = 512 * 2**20


def keep_freed_memory() -> None:
    """For models on the CPU: by default glibc returns large freed blocks to the system, which clears every page again
    at the next allocation, a quarter of the time of a small model's forward. Up to KEPT_MEMORY stays."""
    _set(mmap=32 * 2**20, trim=KEPT_MEMORY)  # the largest threshold that glibc accepts


def return_freed_memory() -> None:
    """For servers without a model on the CPU: by default glibc raises its threshold to the largest block that was ever
    freed, and keeps those below it. So a server that once held many large bodies or answers would keep their memory."""
    _set(mmap=4 * 2**20, trim=_TRIM)


def _set(*, mmap: int, trim: int) -> None:
    with suppress(AttributeError, OSError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, mmap)
        libc.mallopt(_M_TRIM_THRESHOLD, trim)
