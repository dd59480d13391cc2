"""Opens a store for an export, beside the servers that use it, or for an import."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import apsw
import psycopg
from psycopg import IsolationLevel

from ref_server.queue import postgres_schema, sqlite_file, sqlite_schema
from ref_server.queue.interface import StorageBroken
from ref_server.queue.postgres import PostgresDatabase, configure, database_time
from ref_server.queue.postgres import storage_error as postgres_error
from ref_server.queue.sqlite import SqliteDatabase
from ref_server.queue.sqlite_writer import storage_error as sqlite_error
from ref_server.queue.transaction import Database


@contextmanager
def reading_sqlite(path: Path) -> Iterator[Database]:
    """One read transaction: what it shows does not change meanwhile. Raises StorageBroken."""
    if not path.exists():
        raise StorageBroken(f"there is no queue at {path}; name its directory with --data-dir")
    try:
        with closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)) as db:
            db.set_busy_timeout(5000)
            db.pragma("query_only", True)
            _check_version(db.pragma("user_version"), sqlite_schema.SCHEMA_VERSION)
            with db:
                yield SqliteDatabase(db)
    except apsw.Error as error:
        raise sqlite_error(error) from error


@contextmanager
def filling_sqlite(path: Path) -> Iterator[tuple[Database, float]]:
    """One transaction, and the time on the clock of leases. Nobody else may hold the store. Raises StorageBroken."""
    try:
        with sqlite_file.hold(path), closing(apsw.Connection(str(path))) as db:
            sqlite_file.prepare(db, path)
            with db:
                yield SqliteDatabase(db), time.monotonic()
    except apsw.Error as error:
        raise sqlite_error(error) from error


@contextmanager
def reading_postgres(url: str) -> Iterator[Database]:
    """As `reading_sqlite`."""
    try:
        with psycopg.connect(url) as db:
            configure(db)
            db.isolation_level, db.read_only = IsolationLevel.REPEATABLE_READ, True
            found = db.execute("SELECT to_regclass(%s)", [f"{postgres_schema.SCHEMA}.version"]).fetchone()
            if found == (None,):
                raise StorageBroken("there is no queue in this database")
            row = db.execute("SELECT number FROM version").fetchone()
            _check_version(row[0] if row else None, postgres_schema.SCHEMA_VERSION)
            yield PostgresDatabase(db)
    except psycopg.Error as error:
        raise postgres_error(error) from error


@contextmanager
def filling_postgres(url: str) -> Iterator[tuple[Database, float]]:
    """As `filling_sqlite`. Servers may hold the store; their uploads wait."""
    try:
        with psycopg.connect(url) as db:
            configure(db)
            postgres_schema.prepare(db)
            filled = PostgresDatabase(db)
            filled.serialise("admission")
            yield filled, database_time(db)
    except psycopg.Error as error:
        raise postgres_error(error) from error


def _check_version(found: int | None, known: int) -> None:
    if found != known:
        raise StorageBroken(
            f"the store has schema version {found}, this program reads {known}: use the program that made it, or start "
            "a server of this version once, which upgrades it"
        )
