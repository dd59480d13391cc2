"""Opens the schema for an export, beside the servers that use it, or for an import."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import IsolationLevel

from ref_server.queue.errors import OtherSchema, StorageBroken
from ref_server.queue.postgres.schema import SCHEMA, SCHEMA_VERSION, prepare
from ref_server.queue.postgres.store import PostgresDatabase, configure, database_time, storage_error
from ref_server.queue.transaction import Database


@contextmanager
def reading(url: str) -> Iterator[Database]:
    """One read transaction: what it shows does not change meanwhile. Raises StorageBroken."""
    try:
        with psycopg.connect(url) as db:
            configure(db)
            db.isolation_level, db.read_only = IsolationLevel.REPEATABLE_READ, True
            found = db.execute("SELECT to_regclass(%s)", [f"{SCHEMA}.version"]).fetchone()
            if found == (None,):
                raise StorageBroken("there is no queue in this database")
            row = db.execute("SELECT number FROM version").fetchone()
            if row != (SCHEMA_VERSION,):
                raise OtherSchema(row[0] if row else None, SCHEMA_VERSION)
            yield PostgresDatabase(db)
    except psycopg.Error as error:
        raise storage_error(error) from error


@contextmanager
def filling(url: str) -> Iterator[tuple[Database, float]]:
    """One transaction, and the time on the clock of leases. Servers go on; their uploads wait. Raises StorageBroken."""
    try:
        with psycopg.connect(url) as db:
            configure(db)
            prepare(db)
            filled = PostgresDatabase(db)
            filled.serialise("admission")
            yield filled, database_time(db)
    except psycopg.Error as error:
        raise storage_error(error) from error
