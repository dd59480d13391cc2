"""From one version of a store's schema to the next, tried with a made-up step: all of it happens, or nothing."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import apsw
import psycopg
import pytest

from ref_server.queue.errors import StorageBroken
from ref_server.queue.postgres import schema as postgres_schema
from ref_server.queue.postgres.store import PostgresQueue
from ref_server.queue.queue import Queue
from ref_server.queue.sqlite import schema as sqlite_schema
from ref_server.queue.sqlite.store import SqliteQueue
from shared.api import Outcome
from tests.ref_server.queue.backends import PostgresBackend, make_limits, postgres_backend
from tests.ref_server.queue.batches import key, lease_many, ready_upload

ROOT = Path(__file__).parents[3]
# A column with a value for old rows, and one more table.
STEP = """
ALTER TABLE batches ADD COLUMN colour TEXT NOT NULL DEFAULT 'grey';
CREATE TABLE colours (name TEXT PRIMARY KEY);
INSERT INTO colours SELECT DISTINCT colour FROM batches;
"""


def fill(queue: Queue) -> None:
    for id in ("a", "b"):
        queue.put(ready_upload(id))


def check_life(queue: Queue) -> None:
    """The batches of the old version are there, and the queue continues to work."""
    assert not queue.put(ready_upload("a")).created
    assert queue.put(ready_upload("c")).created
    leases = lease_many(queue, count=3)
    assert [lease.id for lease in leases] == ["a", "b", "c"]
    assert queue.ack([key(lease) for lease in leases]) == [Outcome.OK] * 3


def open_sqlite(path: Path) -> closing[SqliteQueue]:
    return closing(SqliteQueue(path, limits=make_limits()))


def test_an_older_file_is_upgraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "queue.sqlite"
    with open_sqlite(path) as queue:
        fill(queue)
    monkeypatch.setattr(sqlite_schema, "SCHEMA_VERSION", sqlite_schema.SCHEMA_VERSION + 1)
    monkeypatch.setitem(sqlite_schema.UPGRADES, sqlite_schema.SCHEMA_VERSION - 1, STEP)
    for _ in range(2):  # the second time there is nothing to do
        with open_sqlite(path):
            pass
    with open_sqlite(path) as queue:
        check_life(queue)
    with closing(apsw.Connection(str(path))) as db:
        assert db.pragma("user_version") == sqlite_schema.SCHEMA_VERSION
        assert db.execute("SELECT name FROM colours").fetchall() == [("grey",)]


def test_a_newer_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"
    with open_sqlite(path):
        pass
    with closing(apsw.Connection(str(path))) as db:
        db.pragma("user_version", 99)
    with pytest.raises(StorageBroken, match=f"{path} has schema version 99, this program reads 1: install the newer"):
        SqliteQueue(path, limits=make_limits())


# Opens a copy of an old file again and again, each time in a process of its own that is killed before the next
# statement, until one is not killed. Prints the version that each process left; the batches must be readable there.
KILLED = """
import os, shutil, signal, sys
from contextlib import closing
from itertools import count
from pathlib import Path
import apsw
from ref_server.config import QueueConfig
from ref_server.queue.sqlite import schema
from ref_server.queue.sqlite.store import SqliteQueue

old, copy = Path(sys.argv[1]), Path(sys.argv[2])
schema.UPGRADES[schema.SCHEMA_VERSION] = sys.argv[3]
schema.SCHEMA_VERSION += 1
for last in count(1):
    for file in copy.parent.glob(copy.name + "*"):
        file.unlink()
    shutil.copy(old, copy)
    child = os.fork()
    if child == 0:
        seen = count(1)
        def trace(cursor, sql, values):
            if next(seen) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return True
        apsw.connection_hooks.append(lambda db: setattr(db, "exec_trace", trace))
        SqliteQueue(copy, limits=QueueConfig().limits).close()
        os._exit(0)
    killed = os.waitpid(child, 0)[1] != 0
    with closing(apsw.Connection(str(copy))) as db:
        print(db.pragma("user_version"), db.execute("SELECT group_concat(id, '') FROM batches").get)
    if not killed:
        break
"""


@pytest.mark.slow
def test_an_upgrade_killed_at_any_statement_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    with open_sqlite(tmp_path / "old") as queue:
        fill(queue)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "old"), str(tmp_path / "copy"), STEP]
    ended = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    versions = [line.split()[0] for line in ended.stdout.splitlines()]
    assert {line.split()[1] for line in ended.stdout.splitlines()} == {"ab"}
    old, new = versions[0], versions[-1]
    assert set(versions) == {old, new} != {new}
    assert versions == sorted(versions)
    assert versions.count(old) > 3


# --- PostgreSQL


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[PostgresBackend]:
    with postgres_backend(tmp_path) as backend:
        yield backend


def open_postgres(backend: PostgresBackend) -> closing[PostgresQueue]:
    return closing(PostgresQueue(backend.url, limits=make_limits()))


def next_version(monkeypatch: pytest.MonkeyPatch, step: str) -> int:
    """Pretends that the program is one version further. Returns that version."""
    old = postgres_schema.SCHEMA_VERSION
    monkeypatch.setattr(postgres_schema, "SCHEMA_VERSION", old + 1)
    monkeypatch.setitem(postgres_schema.UPGRADES, old, step)
    return old + 1


@pytest.mark.slow
def test_an_older_database_is_upgraded(backend: PostgresBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_postgres(backend) as queue:
        fill(queue)
    version = next_version(monkeypatch, STEP)
    for _ in range(2):
        with open_postgres(backend):
            pass
    with open_postgres(backend) as queue:
        check_life(queue)
    with psycopg.connect(backend.url) as db:
        assert db.execute("SELECT number FROM tandem.version").fetchall() == [(version,)]
        assert db.execute("SELECT name FROM tandem.colours").fetchall() == [("grey",)]


@pytest.mark.slow
def test_an_upgrade_that_fails_leaves_the_database_as_it_was(
    backend: PostgresBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_postgres(backend) as queue:
        fill(queue)
    with monkeypatch.context() as broken:
        next_version(broken, STEP + "SELECT * FROM nowhere;")
        with pytest.raises(StorageBroken, match="nowhere"):
            PostgresQueue(backend.url, limits=make_limits())
    with psycopg.connect(backend.url) as db:
        assert db.execute("SELECT number FROM tandem.version").fetchall() == [(1,)]
        assert db.execute("SELECT to_regclass('tandem.colours')").fetchone() == (None,)
    with open_postgres(backend) as queue:
        check_life(queue)


@pytest.mark.slow
def test_a_newer_database_is_refused_by_name(backend: PostgresBackend) -> None:
    with open_postgres(backend):
        pass
    with psycopg.connect(backend.url) as db:
        db.execute("UPDATE tandem.version SET number = 99")
    with pytest.raises(StorageBroken, match="the database has schema version 99, this program reads 1: install"):
        PostgresQueue(backend.url, limits=make_limits())
