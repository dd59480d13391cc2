"""How the store of weights refuses, and file system errors as the errors that clients know."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ref_server.queue.errors import StorageBroken, StorageFull


class NoWeights(Exception):
    """No such version, or no such file in it."""


class WeightsGone(Exception):
    """The version was removed after a newer one was published."""


class WeightsConflict(Exception):
    """The same name with other content."""


class WrongDigest(Exception):
    """A file arrived with other bytes than its Content-Digest says."""


class IncompleteVersion(Exception):
    """A version cannot be committed: a file is missing or differs. field: of the manifest."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


@contextmanager
def disk_failures() -> Iterator[None]:
    """Raises StorageFull for a full disk or quota, StorageBroken for the rest."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"the disk is full: {error}") from error
        raise StorageBroken(f"weights cannot be stored or read: {error}") from error
