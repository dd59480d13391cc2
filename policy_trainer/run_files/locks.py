"""File locks for what one process may use at a time. The system releases them when the process ends."""

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from shared.errors import UserError

# Reduced by the umask. Anyone who can open a file can lock it, so other users must not.
_MODE = 0o660


def hold(
    file: Path, problem: str, remedy: str = "", *, seconds: float = 0.0, on_wait: Callable[[float], None] | None = None
) -> IO[bytes]:
    """Locks a file, which is made if there is none, until the returned file is closed.

    on_wait: called while waiting, with the seconds waited so far; it may raise to stop. Raises UserError with
    problem and remedy when another process still holds the lock after so many seconds.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, _MODE), "wb")
    began = time.monotonic()
    try:
        while not _try_lock(lock):
            waited = time.monotonic() - began
            if waited >= seconds:
                raise UserError(problem, remedy)
            if on_wait is not None:
                on_wait(waited)
            time.sleep(0.1)
    except BaseException:
        lock.close()
        raise
    return lock


def hold_to_read(file: Path) -> IO[bytes] | None:
    """Keeps others from locking an existing file until the returned file is closed, without writing anything.

    None if somebody has locked it. Raises FileNotFoundError.
    """
    lock = file.open("rb")
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


def let_go(lock: IO[bytes]) -> None:
    """Unlocks it, even if a child process that was forked meanwhile has the file open."""
    fcntl.flock(lock, fcntl.LOCK_UN)
    lock.close()


def is_held(file: Path) -> bool:
    """Whether somebody has locked the file. Raises FileNotFoundError if its directory is gone."""
    with file.open("wb") as lock:
        return not _try_lock(lock)


def _try_lock(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
