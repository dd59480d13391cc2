"""Limits of time, memory and processes for the code that this process runs."""

import faulthandler
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

# The parent ends a process that takes too long. A watchdog ends it after this many time limits, in case the parent has
# died while native code holds the GIL.
_WATCHDOG_LIMITS = 3


@contextmanager
def watchdog(seconds: float, file: int) -> Iterator[None]:
    """Ends this process if the block takes three times as long as it may. file: descriptor for the traceback."""
    with suppress(RuntimeError):  # too little memory for its C thread, which needs no GIL
        faulthandler.dump_traceback_later(_WATCHDOG_LIMITS * seconds, exit=True, file=file)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def limit_seconds(seconds: float, error: Exception) -> Iterator[None]:
    """Raises `error` in a block that takes longer than this.

    Native code and threads other than the main thread cannot be interrupted: after twice the time the process writes a
    traceback and ends.
    """
    faulthandler.dump_traceback_later(2 * seconds, exit=True, file=2)  # runs in a C thread that needs no GIL
    try:
        with _alarm(seconds, error) if threading.current_thread() is threading.main_thread() else nullcontext():
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def _alarm(seconds: float, error: Exception) -> Iterator[None]:
    """Raises `error` in the block after so many seconds. An alarm that was set before is restored afterwards."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise error

    handler = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)  # None: not installed from Python
        signal.setitimer(signal.ITIMER_REAL, *timer)


def limit_memory(limit: int, *, more: bool = False) -> None:
    """Limits the address space of this process to `limit` bytes; 0: no limit.

    more: whether the limit counts only what the process adds from now on (Linux).
    """
    if limit:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if more else 0
        resource.setrlimit(resource.RLIMIT_AS, (limit + taken, limit + taken))


def limit_tasks(more: int) -> None:
    """Keeps this process and its descendants from starting processes and threads once the account has `more` more of
    them than now. No effect for root, which Linux does not limit."""
    account = f"\nUid:\t{os.getuid()}\t"
    tasks = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # it has ended
            text = status.read_text(errors="replace")
            tasks += int(text.partition("\nThreads:")[2].split()[0]) if account in text else 0
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = tasks + more if hard == resource.RLIM_INFINITY else min(hard, tasks + more)
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
