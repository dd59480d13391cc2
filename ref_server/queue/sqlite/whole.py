"""Opens the file for an export, beside the server that uses it, or for an import."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import apsw

from ref_server.queue.errors import OtherSchema, StorageBroken
from ref_server.queue.sqlite.file import hold, prepare
from ref_server.queue.sqlite.schema import SCHEMA_VERSION
from ref_server.queue.sqlite.store import SqliteDatabase
from ref_server.queue.sqlite.writer import storage_error
from ref_server.queue.transaction import Database


@contextmanager
def reading(path: Path) -> Iterator[Database]:
    """One read transaction: what it shows does not change meanwhile. Raises StorageBroken."""
    if not path.exists():
        raise StorageBroken(f"there is no queue at {path}; name its directory with --data-dir")
    try:
        with closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)) as db:
            db.set_busy_timeout(5000)
            db.pragma("query_only", True)
            if (found := db.pragma("user_version")) != SCHEMA_VERSION:
                raise OtherSchema(found, SCHEMA_VERSION)
            with db:
                yield SqliteDatabase(db)
    except apsw.Error as error:
        raise storage_error(error) from error


@contextmanager
def filling(path: Path) -> Iterator[tuple[Database, float]]:
    """One transaction, and the time on the clock of leases. Nobody else may hold the store. Raises StorageBroken."""
    try:
        with hold(path), closing(apsw.Connection(str(path))) as db:
            prepare(db, path)
            with db:
                yield SqliteDatabase(db), time.monotonic()
    except apsw.Error as error:
        raise storage_error(error) from error
