"""The embedded queue: one SQLite file, held by one process, written by one thread (`writer.py`)."""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import apsw

from ref_server.metrics.activity import Tally
from ref_server.queue import batches, leasing
from ref_server.queue.disk import Disk
from ref_server.queue.records import DiskSpace
from ref_server.queue.sql import RETENTION_SECONDS, WAITING_SECONDS, SqlQueue
from ref_server.queue.sqlite import file
from ref_server.queue.sqlite.writer import Writer, storage_error
from ref_server.queue.transaction import Transaction, Value
from shared.api import LimitsView

T = TypeVar("T")


class SqliteQueue(SqlQueue):
    """The `Queue` in the file `path`. Creates the file if there is none.

    retention_seconds: how long a settled batch's id stays known. max_waiting_seconds: how long a batch waits untouched
    before it expires. min_free: bytes of the disk that uploads leave free; None: as many as suit its size. clock:
    monotonic seconds, used for leases; a restart starts another clock, so it gives every lease its full time again.
    wall: Unix seconds.
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
            opened.enter_context(file.hold(path))
            self._disk = Disk(path.parent, min_free)
            self._disk.give_way_if_full()
            try:
                db = apsw.Connection(str(path))
                opened.callback(db.close)
                file.prepare(db, path)
            except apsw.Error as error:
                raise storage_error(error) from error
            self._db = SqliteDatabase(db, self._disk)
            self._writer = Writer(db, self.activity, self._disk.give_way)
            opened.callback(self._writer.close)
            self.activity.add(self._writer.call(self._recover, durable=False))
            self._disk.restore()
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Finishes waiting operations. Every later call raises StorageBroken."""
        self._opened.close()

    def _recover(self) -> Tally:
        """Takes back the last process's claims, and restarts the time of leases, which nobody could extend."""
        tx = self._transaction(self._db, self._clock(), self._wall())
        batches.recover(tx)
        leasing.grant_grace(tx)
        return tx.tally

    def disk(self) -> DiskSpace:
        return self._disk.space

    def _run(self, operation: Callable[[Transaction], T], *, durable: bool = False, stores: bool = False) -> T:
        def work() -> tuple[T, Tally]:
            tx = self._begin(self._db, self._clock(), self._wall())
            return operation(tx), tx.tally

        result, tally = self._writer.call(work, durable=durable, stores=stores)
        self.activity.add(tally)
        return result


class SqliteDatabase:
    """The `Database` of the SQLite connection. It needs no locks, since only one thread uses it."""

    lock = ""
    skip_locked = ""

    def __init__(self, db: apsw.Connection, disk: Disk | None = None) -> None:
        self._db = db
        self._disk = disk

    def rows(self, sql: str, values: tuple[Value, ...]) -> list[tuple[Any, ...]]:
        return self._db.execute(sql, values).fetchall()

    def check_disk(self, size: int) -> None:
        if self._disk is not None:
            page, pages, unused = (self._db.pragma(name) for name in ("page_size", "page_count", "freelist_count"))
            owed = max(0, page * pages - os.path.getsize(self._db.filename))
            self._disk.check(size, reusable=page * unused, owed=owed)

    def serialise(self, name: str) -> None:
        pass
