"""A backup of the embedded queue: a copy of its file as of one moment, also while a server uses it."""

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import apsw

from ref_server.queue.errors import StorageBroken, StorageFull
from ref_server.queue.sqlite.store import refuse_old_sqlite
from ref_server.queue.sqlite.writer import storage_error
from shared.atomic_files import atomic_file, is_same_file, sync

_MIB = 2**20
# Pages in one step: Ctrl-C and the progress wait for a step of 4 MiB.
PAGES = 1024


def back_up(path: Path, target: Path, progress: Callable[[int, int], object]) -> None:
    """Copies the queue at `path` to the file `target`, which appears complete or not at all.

    An older backup of this name is replaced. Only the owner may read the file: it holds the tokens of leases. One read
    transaction lasts for the whole copy, so the write-ahead log grows by what a server writes meanwhile.

    progress: takes the pages that were copied, and how many there are. Raises StorageBroken, StorageFull, OSError.
    """
    refuse_old_sqlite()
    if not path.exists():
        raise StorageBroken(f"there is no queue at {path}; name its directory with --data-dir")
    _refuse_target(path, target)
    try:
        with closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)) as source:
            source.set_busy_timeout(5000)
            source.pragma("query_only", True)
            with source:  # without a transaction the copy would begin again whenever a server has written
                _check_room(target, source.pragma("page_count") * source.pragma("page_size"))
                with atomic_file(target, mode=0o600) as temporary, temporary.open("rb") as copy:
                    _copy(source, temporary, progress)
                    os.fsync(copy.fileno())  # now, because the check must come just before the rename
                    if not is_same_file(temporary, os.fstat(copy.fileno())):
                        raise StorageBroken(f"another backup to {target} has begun meanwhile")
                sync(target.parent)
    except apsw.Error as error:
        raise storage_error(error) from error


def _refuse_target(path: Path, target: Path) -> None:
    """A backup must not replace the file of a queue, which a server may have open."""
    if target.exists() and not target.is_file():
        raise StorageBroken(f"{target} is not a regular file: name a new file, or an older backup")
    if target.parent.samefile(path.parent) or target.with_name(f"{path.name}.lock").exists():
        raise StorageBroken(f"{target.parent} is the data directory of a queue: choose a file in another directory")


def _check_room(target: Path, size: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if size > free:
        raise StorageFull(
            f"the disk of {target} is too full: the backup has {size / _MIB:,.1f} MiB, {free / _MIB:,.1f} MiB are free"
        )


def _copy(source: apsw.Connection, temporary: Path, progress: Callable[[int, int], object]) -> None:
    with closing(apsw.Connection(str(temporary))) as copy:
        # No journal and no flushes: a failed copy is deleted, and a complete one is flushed as a whole.
        copy.pragma("journal_mode", "OFF")
        copy.pragma("synchronous", "OFF")
        with copy.backup("main", source, "main") as backup:
            while not backup.step(PAGES):
                progress(backup.page_count - backup.remaining, backup.page_count)
