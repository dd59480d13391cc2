"""Stores of older versions: each goes on as if the newest version had made it, or stays as it was."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest

from ref_server.queue.errors import StorageBroken
from ref_server.queue.interface import Queue
from ref_server.queue.postgres.store import PostgresQueue
from ref_server.queue.records import Upload
from ref_server.queue.sqlite.store import SqliteQueue
from shared.api import Key, LeaseBody, Outcome, State
from tests.ref_server.queue.backends import PostgresBackend, make_limits, postgres_backend

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SQLITE = sorted(HERE.glob("sqlite/schema-*.sql"))
POSTGRES = sorted(HERE.glob("postgres/schema-*.sql"))
# Two batches sampled before the checkpoint at version 5 that epoch 2 resumed from, or after it, and one that is done.
_COLUMNS = (
    "id, content_hash, run, epoch, policy_version, prompt_tokens, completion_tokens, completions, payload_bytes, "
    "admitted_at, state, scored"
)
FILL = f"""
INSERT INTO batches ({_COLUMNS}) VALUES
    ('a', 'x', 'run', 1, 3, 4, 6, 2, 1, 0, 'ready', TRUE), ('b', 'x', 'run', 1, 9, 4, 6, 2, 1, 0, 'ready', TRUE),
    ('c', 'x', 'run', 1, 9, 4, 6, 2, 0, 0, 'done', TRUE);
INSERT INTO payloads (seq, body) VALUES (1, 'x'), (2, 'x');
INSERT INTO events (seq, at, state, detail) VALUES (1, 0, 'ready', ''), (2, 0, 'ready', ''), (3, 0, 'done', 'first');
INSERT INTO epochs (run, epoch, fork_version) VALUES ('run', 2, 5);
"""
# SQLite's epochs know lineages since version 3, and name them always.
FILL_EPOCHS = FILL.replace("epochs (run, epoch", "epochs (run, lineage, epoch").replace(
    "('run', 2, 5)", "('run', '', 2, 5)"
)


def sqlite_fill(dump: Path) -> str:
    """As the programs of a version wrote it: SQLite's own types are strict."""
    filled = (FILL if dump.stem[-1] in "12" else FILL_EPOCHS).replace("'x'", "x'78'")
    return dump.read_text() + filled


def make_old(path: Path, dump: Path) -> None:
    with closing(apsw.Connection(str(path))) as db:
        db.pragma("journal_mode", "WAL")
        db.execute(sqlite_fill(dump))


def check_life(queue: Queue) -> None:
    """What was there is there, and goes on."""
    done = queue.get("c")
    assert done is not None
    assert [event.detail for event in done.history] == ["first"]
    assert queue.stats().waiting_batches == 2
    (held,) = queue.lease(LeaseBody(consumer="c", run="run", epoch=2, policy_version=5))
    assert held.id == "a"
    assert [batch.reason for batch in queue.list(State.EXPIRED, None, 9, None).batches] == ["abandoned"]
    assert queue.ack([Key(id="a", token=held.token)]) == [Outcome.OK]
    assert queue.put(Upload("d", b"." * 32, "run", 2, 5, 4, 6, 2, b"raw", lineage="", to_score=True)).created
    assert [claim.id for claim in queue.claim(100)] == ["d"]
    assert {state: depth.batches for state, depth in queue.stats().runs["run"].items()} == {
        State.DONE: 2, State.EXPIRED: 1, State.SCORING: 1,
    }  # fmt: skip


@pytest.mark.parametrize("dump", SQLITE, ids=lambda dump: dump.stem)
def test_a_file_of_each_version_goes_on(tmp_path: Path, dump: Path) -> None:
    """Those before lineages have the batches of clients that name none."""
    make_old(tmp_path / "queue.sqlite", dump)
    for _ in range(2):  # the second time there is nothing to do
        with closing(SqliteQueue(tmp_path / "queue.sqlite", limits=make_limits())) as queue:
            assert queue.stats().waiting_batches == 2
    with closing(SqliteQueue(tmp_path / "queue.sqlite", limits=make_limits())) as queue:
        check_life(queue)


@pytest.mark.parametrize("dump", SQLITE, ids=lambda dump: dump.stem)
def test_an_upgraded_file_is_as_a_new_one(tmp_path: Path, dump: Path) -> None:
    make_old(tmp_path / "old", dump)
    for name in ("old", "new"):
        SqliteQueue(tmp_path / name, limits=make_limits()).close()
    assert sqlite_shape(tmp_path / "old") == sqlite_shape(tmp_path / "new")


def sqlite_shape(path: Path) -> dict[str, Any]:
    """Tables with their columns in any order, and the other objects' SQL without its blanks."""
    with closing(apsw.Connection(str(path))) as db:
        made = db.execute("SELECT name, type, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'").fetchall()
        return {
            str(name): sorted(tuple(row)[1:] for row in db.execute(f"PRAGMA table_info({name})"))
            if kind == "table"
            else " ".join(str(sql).split())
            for name, kind, sql in made
        }


# Opens a copy of an old file again and again, each time in a process of its own that is killed before the next
# statement, until one is not killed. Prints the version that each process left; the batches must be readable there.
KILLED = """
import os, shutil, signal, sys
from contextlib import closing
from itertools import count
from pathlib import Path
import apsw
from ref_server.config import QueueConfig
from ref_server.queue.sqlite.store import SqliteQueue

old, copy = Path(sys.argv[1]), Path(sys.argv[2])
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
@pytest.mark.parametrize("dump", SQLITE, ids=lambda dump: dump.stem)
def test_an_upgrade_killed_at_any_statement_leaves_the_old_file_or_the_new(tmp_path: Path, dump: Path) -> None:
    make_old(tmp_path / "old", dump)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "old"), str(tmp_path / "copy")]
    ended = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    versions = [line.split()[0] for line in ended.stdout.splitlines()]
    assert {line.split()[1] for line in ended.stdout.splitlines()} == {"abc"}
    old, new = versions[0], versions[-1]
    assert set(versions) == {old, new} != {new}
    assert versions == sorted(versions)
    assert versions.count(old) > 3


# --- PostgreSQL


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[PostgresBackend]:
    with postgres_backend(tmp_path) as backend:
        yield backend


def make_old_database(url: str, dump: Path) -> None:
    with psycopg.connect(url) as db:
        db.execute((dump.read_text() + FILL).encode())


@pytest.mark.slow
@pytest.mark.parametrize("dump", POSTGRES, ids=lambda dump: dump.stem)
def test_a_database_of_each_version_goes_on(backend: PostgresBackend, dump: Path) -> None:
    make_old_database(backend.url, dump)
    for _ in range(2):  # the second time there is nothing to do
        with closing(PostgresQueue(backend.url, limits=make_limits())) as queue:
            assert queue.stats().waiting_batches == 2
    with closing(PostgresQueue(backend.url, limits=make_limits())) as queue:
        check_life(queue)


@pytest.mark.slow
@pytest.mark.parametrize("dump", POSTGRES, ids=lambda dump: dump.stem)
def test_an_upgraded_database_is_as_a_new_one(backend: PostgresBackend, dump: Path) -> None:
    PostgresQueue(backend.url, limits=make_limits()).close()
    new = postgres_shape(backend.url)
    with psycopg.connect(backend.url) as db:
        db.execute("DROP SCHEMA tandem CASCADE")
    make_old_database(backend.url, dump)
    PostgresQueue(backend.url, limits=make_limits()).close()
    assert postgres_shape(backend.url) == new


@pytest.mark.slow
def test_an_upgrade_that_fails_leaves_the_database_as_it_was(backend: PostgresBackend) -> None:
    make_old_database(backend.url, POSTGRES[0])
    with psycopg.connect(backend.url) as db:
        db.execute("CREATE TABLE tandem.reference (name TEXT)")
    old = postgres_shape(backend.url)
    with pytest.raises(StorageBroken, match="reference"):
        PostgresQueue(backend.url, limits=make_limits())
    assert postgres_shape(backend.url) == old
    with psycopg.connect(backend.url) as db:
        assert db.execute("SELECT number FROM tandem.version").fetchall() == [(1,)]


def postgres_shape(url: str) -> list[tuple[Any, ...]]:
    """Columns in any order, constraints and indexes."""
    with psycopg.connect(url) as db:
        columns = db.execute(
            "SELECT table_name, column_name, data_type, collation_name, column_default, is_nullable "
            "FROM information_schema.columns WHERE table_schema = 'tandem' ORDER BY 1, 2"
        ).fetchall()
        indexes = db.execute("SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'tandem' ORDER BY 1")
        return columns + indexes.fetchall()
