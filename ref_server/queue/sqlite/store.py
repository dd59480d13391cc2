"""The embedded queue: one SQLite file, held by one process, written by one thread (`writer.py`)."""

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, TypeVar

import apsw
import psutil

from ref_server.queue import batches, leases
from ref_server.queue.disk import Disk
from ref_server.queue.errors import StorageBroken
from ref_server.queue.queue import RETENTION_SECONDS, WAITING_SECONDS, Queue
from ref_server.queue.records import DiskSpace
from ref_server.queue.sqlite.schema import create_or_upgrade
from ref_server.queue.sqlite.writer import Writer, storage_error
from ref_server.queue.transaction import Transaction, Value
from shared.api import LimitsView

T = TypeVar("T")

# The name of the file in the data directory.
QUEUE_FILE = "queue.sqlite"

# Network file systems: WAL mode's shared memory and locks do not work on them, or not reliably.
_NETWORK = {"afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "smb3", "smbfs"}

# Older versions can reset the WAL while another connection reads it, a rare bug that loses data.
_OLDEST_SQLITE = (3, 51, 3)


class SqliteQueue(Queue):
    """The `Queue` in the file `path`. Creates the file if there is none.

    min_free: bytes of the disk that uploads leave free; None: as many as suit its size. clock: monotonic seconds, used
    for leases; a restart starts another clock, so it gives every lease its full time again. wall: Unix seconds.

    Raises StorageBroken when the file is damaged, of an unknown schema, on a network file system, or held by another
    process.
    """

    def __init__(
        self,
        path: Path,
        *,
        limits: LimitsView,
        retention_seconds: float = RETENTION_SECONDS,
        max_waiting_seconds: float = WAITING_SECONDS,
        min_free: int | None = 0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(limits, retention_seconds, max_waiting_seconds)
        self._clock = clock
        self._wall = wall
        with ExitStack() as opened:
            opened.enter_context(hold(path))
            self._disk = Disk(path.parent, min_free)
            self._disk.give_way_if_full()
            try:
                db = apsw.Connection(str(path))
                opened.callback(db.close)
                _prepare(db, path)
            except apsw.Error as error:
                raise storage_error(error) from error
            self._db = SqliteDatabase(db, self._disk)
            self._writer = Writer(db, self.activity, self._disk.give_way)
            opened.callback(self._writer.close)
            tx = self._writer.call(self._recover, durable=False)
            self.activity.add(tx.counts, tx.ready_after)
            self._disk.restore()
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Finishes waiting operations. Every later call raises StorageBroken."""
        self._opened.close()

    def _recover(self) -> Transaction:
        """Takes back the last process's claims, and restarts the time of leases, since they could not be extended."""
        tx = self._transaction(self._db, self._clock(), self._wall())
        batches.recover(tx)
        leases.grant_grace(tx)
        return tx

    def disk(self) -> DiskSpace:
        return self._disk.space

    def _run(self, operation: Callable[[Transaction], T], *, durable: bool = False, stores: bool = False) -> T:
        def work() -> tuple[T, Transaction]:
            tx = self._begin(self._db, self._clock(), self._wall())
            return operation(tx), tx

        result, tx = self._writer.call(work, durable=durable, stores=stores)
        self.activity.add(tx.counts, tx.ready_after)
        return result


class SqliteDatabase:
    """A `Database`. It needs no locks, since only one thread uses the connection."""

    lock = ""
    skip_locked = ""

    def __init__(self, db: apsw.Connection, disk: Disk) -> None:
        self._db = db
        self._disk = disk

    def rows(self, sql: str, values: tuple[Value, ...]) -> list[tuple[Any, ...]]:
        return self._db.execute(sql, values).fetchall()

    def check_disk(self, size: int) -> None:
        page, pages, unused = (self._db.pragma(name) for name in ("page_size", "page_count", "freelist_count"))
        owed = max(0, page * pages - os.path.getsize(self._db.filename))
        self._disk.check(size, reusable=page * unused, owed=owed)

    def serialise(self, name: str) -> None:
        pass


def hold(path: Path) -> IO[bytes]:
    """Locks the data directory until the returned file is closed. Raises StorageBroken."""
    lock_path = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds all batches
        _refuse_network(path.parent)
        lock = lock_path.open("wb")
    except OSError as error:
        raise StorageBroken(f"data_dir: cannot write to {path.parent}: {error}; choose another --data-dir") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise StorageBroken(
            f"another process holds {path}; stop it, or choose another --data-dir ({lock_path.name}: {error})"
        ) from error
    return lock


def _refuse_network(directory: Path) -> None:
    above = [directory.resolve(), *directory.resolve().parents]
    mounted = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    kind = next((mounted[path].lower() for path in above if path in mounted), "")
    if kind in _NETWORK or kind.startswith("fuse.ssh"):
        raise StorageBroken(
            f"{directory} is on a network file system ({kind}), where SQLite cannot guarantee durability: "
            "choose a directory on a local disk, or a store on PostgreSQL"
        )


def refuse_old_sqlite() -> None:
    version = apsw.sqlite_lib_version()
    if tuple(int(part) for part in version.split(".")) < _OLDEST_SQLITE:
        needed = ".".join(map(str, _OLDEST_SQLITE))
        raise StorageBroken(f"SQLite is {version}; older than {needed} it can lose data: pip install --upgrade apsw")


def _prepare(db: apsw.Connection, path: Path) -> None:
    """Checks the file, creates its schema or upgrades an older one, sets the pragmas of `db`.

    Raises StorageBroken, apsw.Error.
    """
    refuse_old_sqlite()
    verdict = db.pragma("quick_check", 1)
    if verdict != "ok":
        raise StorageBroken(f"{path} is damaged: {verdict}")
    db.set_busy_timeout(5000)  # in case someone reads the file with the sqlite3 shell
    db.pragma("journal_mode", "WAL")
    db.pragma("foreign_keys", True)
    db.pragma("fullfsync", True)  # macOS: a plain fsync stops at the drive's cache
    db.pragma("journal_size_limit", 64 * 2**20)  # truncates a WAL that grew during a burst
    create_or_upgrade(db, path)
