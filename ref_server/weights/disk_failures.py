"""Errors of the file system as the errors that clients know."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ref_server.queue.errors import StorageBroken, StorageFull


@contextmanager
def disk_failures() -> Iterator[None]:
    """Raises StorageFull for a full disk or quota, StorageBroken for the rest."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"the disk is full: {error}") from error
        raise StorageBroken(f"weights cannot be stored or read: {error}") from error
