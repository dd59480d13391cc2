"""From one version of a store's schema to the next, tried with a made-up step: all of it happens, or nothing."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest

from ref_server.queue.errors import StorageBroken
from ref_server.queue.postgres import schema as postgres_schema
from ref_server.queue.queue import Queue
from ref_server.queue.schema import SCHEMA_VERSION
from ref_server.queue.sqlite import schema as sqlite_schema
from shared.api import Outcome
from tests.ref_server.queue.backends import Backend, Clock, PostgresBackend, SqliteBackend, make_limits
from tests.ref_server.queue.batches import key, lease_many, ready_upload

ROOT = Path(__file__).parents[3]
# A column with a value for old rows, and one more table.
STEP = """
ALTER TABLE batches ADD COLUMN colour TEXT NOT NULL DEFAULT 'grey';
CREATE TABLE colours (name TEXT PRIMARY KEY);
INSERT INTO colours SELECT DISTINCT colour FROM batches;
"""


def opened(backend: Backend) -> closing[Queue]:
    return closing(backend.open(Clock(), make_limits()))


def fill(backend: Backend) -> None:
    with opened(backend) as queue:
        for id in ("a", "b"):
            queue.put(ready_upload(id))


def check_life(backend: Backend) -> None:
    """The batches of the old version are there, and the queue continues to work."""
    with opened(backend) as queue:
        assert not queue.put(ready_upload("a")).created
        assert queue.put(ready_upload("c")).created
        leases = lease_many(queue, count=3)
        assert [lease.id for lease in leases] == ["a", "b", "c"]
        assert queue.ack([key(lease) for lease in leases]) == [Outcome.OK] * 3


def run(backend: Backend, of_sqlite: str, of_postgres: str) -> list[Any]:
    """Runs a statement in the store itself. Returns the first value of each row."""
    if isinstance(backend, SqliteBackend):
        with closing(apsw.Connection(str(backend.path))) as db:
            return [row[0] for row in db.execute(of_sqlite)]
    assert isinstance(backend, PostgresBackend)
    with psycopg.connect(backend.url, options="-c search_path=tandem") as db:
        cursor = db.execute(of_postgres.encode())
        return [row[0] for row in cursor] if cursor.description else []


def version(backend: Backend) -> int:
    return run(backend, "PRAGMA user_version", "SELECT number FROM version")[0]


def next_version(backend: Backend, monkeypatch: pytest.MonkeyPatch, step: str) -> int:
    """Pretends that the program is one version further. Returns that version."""
    schema = sqlite_schema if isinstance(backend, SqliteBackend) else postgres_schema
    old = schema.SCHEMA_VERSION
    monkeypatch.setattr(schema, "SCHEMA_VERSION", old + 1)
    monkeypatch.setitem(schema.UPGRADES, old, step)
    return old + 1


def test_an_older_store_is_upgraded(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(backend)
    newer = next_version(backend, monkeypatch, STEP)
    for _ in range(2):  # the second time there is nothing to do
        with opened(backend):
            pass
    check_life(backend)
    assert version(backend) == newer
    assert run(backend, *["SELECT name FROM colours"] * 2) == ["grey"]


def test_an_upgrade_that_fails_leaves_the_store_as_it_was(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(backend)
    with monkeypatch.context() as broken:
        next_version(backend, broken, STEP + "SELECT * FROM nowhere;")
        with pytest.raises((StorageBroken, apsw.SQLError), match="nowhere"):
            opened(backend)
    assert version(backend) == SCHEMA_VERSION
    tables = "SELECT name FROM sqlite_schema WHERE name = 'colours'", "SELECT to_regclass('colours')::text"
    assert run(backend, *tables) in ([], [None])
    check_life(backend)


@pytest.mark.parametrize("other", [SCHEMA_VERSION - 1, 99])
def test_a_newer_store_is_refused_by_name_and_an_older_one_without_a_step(backend: Backend, other: int) -> None:
    with opened(backend):
        pass
    run(backend, f"PRAGMA user_version = {other}", f"UPDATE version SET number = {other}")
    refusal = f"has schema version {other}, this program reads {SCHEMA_VERSION}: install the version that"
    with pytest.raises(StorageBroken, match=refusal):
        opened(backend)


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
    backend = SqliteBackend(tmp_path)
    fill(backend)
    command = [sys.executable, "-c", KILLED, str(backend.path), str(tmp_path / "copy"), STEP]
    ended = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    versions = [line.split()[0] for line in ended.stdout.splitlines()]
    assert {line.split()[1] for line in ended.stdout.splitlines()} == {"ab"}
    old, new = versions[0], versions[-1]
    assert set(versions) == {old, new} != {new}
    assert versions == sorted(versions)
    assert versions.count(old) > 3
