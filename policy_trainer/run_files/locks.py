"""Locks of directories that one process may write at a time. The system releases them when the process ends."""

import fcntl
import time
from pathlib import Path
from typing import IO

from shared.errors import UserError


def hold(directory: Path, refusal: str, *, seconds: float = 0.0) -> IO[bytes]:
    """Locks a directory, which is made if there is none, until the returned file is closed.

    Raises UserError with the refusal when another process still holds the lock after so many seconds.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = (directory / "lock").open("wb")
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError:
            if time.monotonic() >= deadline:
                lock.close()
                raise UserError(refusal) from None
            time.sleep(0.1)
