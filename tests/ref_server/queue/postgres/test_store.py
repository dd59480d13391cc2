"""The queue on PostgreSQL: several servers at once, and a database that fails."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ref_server.queue.errors import QueueFull, StorageBroken, WrongState
from ref_server.queue.postgres import schema
from ref_server.queue.postgres.store import PostgresQueue, database_time
from ref_server.queue.queue import Queue
from ref_server.queue.records import Upload
from shared.api import LeaseKey, Outcome, State
from tests.harness.postgresql import Postgres, PostgresMissing, postgres
from tests.harness.processes import until
from tests.ref_server.queue.backends import PostgresBackend, make_limits, postgres_backend
from tests.ref_server.queue.batches import key, lease_many, ready_upload, state, upload

pytestmark = pytest.mark.slow


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[PostgresBackend]:
    with postgres_backend(tmp_path) as backend:
        yield backend


@pytest.fixture
def servers(backend: PostgresBackend) -> Iterator[list[PostgresQueue]]:
    """Two servers on one database, as in life: on the database's clock."""
    with ExitStack() as stack:
        yield [stack.enter_context(opened(backend)) for _ in range(2)]


def opened(backend: PostgresBackend, **settings: Any) -> closing[PostgresQueue]:
    return closing(PostgresQueue(backend.url, limits=make_limits(), **settings))


def ready(queue: Queue, *ids: str) -> None:
    for id in ids:
        queue.put(ready_upload(id))


def lease(queue: Queue, consumer: str = "trainer", **request) -> LeaseKey | None:
    held = lease_many(queue, consumer, **{"lease_seconds": 60.0, **request})
    return key(held[0]) if held else None


# --- several servers


def test_many_at_once_lease_every_batch_once(servers: list[PostgresQueue]) -> None:
    ready(servers[0], *map(str, range(60)))
    leased: list[str] = []

    def drain(number: int) -> None:
        queue = servers[number % 2]
        while held := lease(queue, f"trainer {number}"):
            leased.append(held.id)
            assert queue.ack([held]) == [Outcome.OK]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(drain, range(8)))
    assert Counter(leased) == {str(number): 1 for number in range(60)}


def test_many_at_once_score_every_batch_once(servers: list[PostgresQueue]) -> None:
    for number in range(60):
        servers[0].put(upload(str(number)))
    scored: list[str] = []

    def score(number: int) -> None:
        queue = servers[number % 2]
        while claims := queue.claim(20):
            for claim in claims:
                queue.complete(claim.id, b"scored")
                scored.append(claim.id)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(score, range(4)))
    assert Counter(scored) == {str(number): 1 for number in range(60)}


def test_the_limits_hold_exactly_when_many_upload_at_once(backend: PostgresBackend) -> None:
    def put(number: int) -> bool:
        try:
            return queues[number % 2].put(upload(str(number))).created
        except QueueFull:
            return False

    with ExitStack() as stack:
        limits = make_limits(max_batches=50)
        queues = [stack.enter_context(closing(PostgresQueue(backend.url, limits=limits))) for _ in range(2)]
        with ThreadPoolExecutor(8) as pool:
            admitted = list(pool.map(put, range(60)))
        assert sum(admitted) == 25
        assert sum(depth.batches for states in queues[0].stats().runs.values() for depth in states.values()) == 25


def test_one_upload_that_comes_twice_at_once_is_admitted_once(servers: list[PostgresQueue]) -> None:
    with ThreadPoolExecutor(8) as pool:
        admissions = list(pool.map(lambda number: servers[number % 2].put(upload("a")), range(16)))
    assert sum(admission.created for admission in admissions) == 1


def test_a_request_that_is_repeated_before_it_is_answered_leases_once(servers: list[PostgresQueue]) -> None:
    ready(servers[0], "a", "b", "c")
    with ThreadPoolExecutor(6) as pool:
        keys = list(pool.map(lambda number: lease(servers[number % 2], request_id="same"), range(6)))
    assert len(set(keys)) == 1


@pytest.mark.parametrize("meanwhile", ["released", "leased to another", "acked"])
def test_a_request_that_is_repeated_while_its_lease_ends_gets_no_others_lease(
    meanwhile: str, backend: PostgresBackend, servers: list[PostgresQueue]
) -> None:
    """Another transaction holds the payloads until the lease has ended: a lease that is read in parts stops between."""
    ready(servers[0], "a")
    held = lease(servers[0], request_id="same")
    assert held is not None
    ends = {
        "released": "UPDATE tandem.batches SET state = 'ready', token = NULL, consumer = NULL, request_id = NULL",
        "leased to another": "UPDATE tandem.batches SET token = 'theirs', consumer = 'other', request_id = NULL",
        "acked": "DELETE FROM tandem.payloads; UPDATE tandem.batches SET state = 'done'",
    }
    with psycopg.connect(backend.url) as other, ThreadPoolExecutor(1) as pool:
        other.execute("LOCK TABLE tandem.payloads")
        repeated = pool.submit(lease, servers[1], request_id="same")
        until(lambda: _waiting_for_locks(backend) == 1)
        for statement in ends[meanwhile].split("; "):
            other.execute(statement.encode())
        other.commit()
        again = repeated.result(timeout=60)
    if meanwhile == "released":
        assert again is not None and again.token != held.token
        assert servers[0].ack([again]) == [Outcome.OK]
    else:
        assert again is None


def test_an_upload_that_meets_the_end_of_its_run_expires(
    backend: PostgresBackend, servers: list[PostgresQueue]
) -> None:
    """Another transaction holds the payloads, so that the upload stops after it has seen that the run goes on."""
    assert lease(servers[0], run="run") is None  # from now on the run is known
    with psycopg.connect(backend.url) as other, ThreadPoolExecutor(2) as pool:
        other.execute("LOCK TABLE tandem.payloads")
        uploaded = pool.submit(servers[0].put, ready_upload("a"))
        until(lambda: _waiting_for_locks(backend) == 1)
        finished = pool.submit(servers[1].finish, "run", "")
        until(lambda: finished.done() or _waiting_for_locks(backend) == 2)
        other.commit()
        assert uploaded.result(timeout=60).created
        finished.result(timeout=60)
    assert state(servers[0], "a") is State.EXPIRED


def test_what_is_given_back_while_its_run_ends_expires(backend: PostgresBackend, servers: list[PostgresQueue]) -> None:
    """Another transaction holds the second batch, so that the release stops after the first, which is ready then."""
    ready(servers[0], "a", "b")
    keys = [held for _ in range(2) if (held := lease(servers[0], run="run"))]
    with psycopg.connect(backend.url) as other, ThreadPoolExecutor(2) as pool:
        other.execute("SELECT 1 FROM tandem.batches WHERE id = 'b' FOR UPDATE")
        released = pool.submit(servers[0].release, keys)
        until(lambda: _waiting_for_locks(backend) == 1)
        finished = pool.submit(servers[1].finish, "run", "")
        until(lambda: finished.done() or _waiting_for_locks(backend) == 2)
        other.commit()
        assert released.result(timeout=60) == [Outcome.OK, Outcome.OK]
        finished.result(timeout=60)
    assert [state(servers[0], id) for id in "ab"] == [State.EXPIRED, State.EXPIRED]


def test_those_who_settle_the_same_batches_in_other_orders_do_not_block_each_other(
    servers: list[PostgresQueue],
) -> None:
    ready(servers[0], *map(str, range(30)))
    keys = [held for _ in range(30) if (held := lease(servers[0]))]
    orders = [keys, keys[::-1]] * 4
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda item: servers[item[0] % 2].extend(item[1], 60.0), enumerate(orders)))
    assert all(each == [Outcome.OK] * 30 for each in outcomes)


def test_what_a_server_was_scoring_when_it_died_is_scored_by_another(backend: PostgresBackend) -> None:
    def server(upkeep_seconds: float) -> PostgresQueue:
        return PostgresQueue(backend.url, limits=make_limits(), claim_seconds=2, upkeep_seconds=upkeep_seconds)

    with closing(server(3600)) as silent, closing(server(0.1)) as other:
        silent.put(upload("a"))
        [claim] = silent.claim(100)
        assert other.claim(100) == []
        until(lambda: state(other, "a") is State.QUEUED)
        [again] = other.claim(100)
        with pytest.raises(WrongState, match="not being scored here"):
            silent.complete(claim.id, b"too late")
        other.complete(again.id, b"scored")
        assert other.payload("a") == (b"raw", b"scored")


def test_a_server_that_lives_keeps_its_claims(backend: PostgresBackend) -> None:
    with opened(backend, claim_seconds=0.6, upkeep_seconds=0.1) as queue:
        queue.put(upload("a"))
        queue.claim(100)
        time.sleep(1.5)
        assert state(queue, "a") is State.SCORING
        queue.complete("a", b"scored")


def test_the_renewal_of_claims_survives_a_bug(backend: PostgresBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is not ready as long as it keeps failing; then it goes on with the claims that it had."""
    with opened(backend, claim_seconds=8, upkeep_seconds=0.1) as queue:
        queue.put(upload("a"))
        queue.claim(100)
        with monkeypatch.context() as broken:
            broken.setattr(schema, "ADD_UP", "SELECT 1 / 0")
            until(lambda: _check(queue).startswith("claim renewal failed 3 times in a row"))
        until(lambda: not _check(queue))
        queue.complete("a", b"scored")


def _check(queue: Queue) -> str:
    """Why the store cannot be used; empty if it can."""
    try:
        queue.check()
    except StorageBroken as error:
        return str(error)
    return ""


def test_a_restart_of_a_server_changes_nothing_for_leases(backend: PostgresBackend) -> None:
    with opened(backend) as queue:
        ready(queue, "a", "b")
        held, short = lease(queue), lease(queue, lease_seconds=0.2)
    with opened(backend) as queue:
        assert held is not None
        assert short is not None
        until(lambda: state(queue, "b") is State.READY)
        assert queue.ack([held, short]) == [Outcome.OK, Outcome.STALE]


def test_counts_stay_right_and_few_under_load(servers: list[PostgresQueue], backend: PostgresBackend) -> None:
    def cycle(number: int) -> None:
        queue = servers[number % 2]
        ready(queue, str(number))
        if held := lease(queue, f"trainer {number % 4}"):
            queue.ack([held])

    def rows() -> int:
        with psycopg.connect(backend.url) as db:
            row = db.execute("SELECT count(*) FROM tandem.depths").fetchone()
        assert row is not None
        return row[0]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(cycle, range(120)))
    until(lambda: rows() <= 100)
    counted = {state: depth.batches for states in servers[0].stats().runs.values() for state, depth in states.items()}
    listed = Counter(info.state for info in servers[0].list(None, None, 1000, None).batches)
    assert counted == dict(listed)


# --- the database


def test_two_servers_that_start_at_once_make_one_schema(backend: PostgresBackend) -> None:
    with ThreadPoolExecutor(4) as pool:
        queues = list(pool.map(lambda _: PostgresQueue(backend.url, limits=make_limits()), range(4)))
    ready(queues[0], "a")
    assert state(queues[3], "a") is State.READY
    for queue in queues:
        queue.close()


def test_a_database_that_is_not_there_is_named_without_its_password() -> None:
    with pytest.raises(StorageBroken, match="Connection refused") as refusal:
        PostgresQueue("postgresql://tandem:secret@127.0.0.1:9/queue", limits=make_limits())
    assert "secret" not in str(refusal.value)


def test_texts_of_a_database_without_an_encoding(backend: PostgresBackend) -> None:
    name = backend.url.rpartition("/")[2]
    with psycopg.connect(backend.url, autocommit=True) as db:
        db.execute(f"CREATE DATABASE {name}_ascii ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0".encode())
    with closing(PostgresQueue(f"{backend.url}_ascii", limits=make_limits())) as queue:
        ready(queue, "Ä")
        assert state(queue, "Ä") is State.READY


def test_a_read_only_database_is_reported_and_survived(backend: PostgresBackend) -> None:
    database = backend.url.rpartition("/")[2]
    with opened(backend) as queue:
        with psycopg.connect(backend.url, autocommit=True) as db:
            db.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = on".encode())
            _end_others(db)
            with pytest.raises(StorageBroken, match="read-only"):
                queue.put(upload("a"))
            with pytest.raises(StorageBroken, match="read-only"):
                queue.check()
            db.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = off".encode())
        # Connections from before stay read-only, and each is replaced when that shows: which one comes next is open.
        until(lambda: _admits(queue, upload("a")))


def test_a_commit_that_is_promised_waits_for_the_disk_and_others_do_not(backend: PostgresBackend) -> None:
    settings: list[str] = []

    def clock(db: psycopg.Connection) -> float:
        """Called in each transaction."""
        [setting] = db.execute("SHOW synchronous_commit").fetchone() or [""]
        settings.append(setting)
        return database_time(db)

    def settings_of(operation: Callable[[], object]) -> list[str]:
        settings.clear()
        operation()
        return list(settings)

    with opened(backend, upkeep_seconds=3600, clock=clock) as queue:
        assert settings_of(lambda: ready(queue, "a")) == ["on"]
        keys: list[LeaseKey | None] = []
        assert settings_of(lambda: keys.append(lease(queue))) == ["on"]
        [held] = keys
        assert held is not None
        assert settings_of(lambda: queue.extend([held], 60.0)) == ["off"]
        assert settings_of(lambda: queue.ack([held])) == ["on"]


def test_texts_with_a_nul_are_taken(backend: PostgresBackend) -> None:
    with opened(backend) as queue:
        ready(queue, "a")
        held = lease(queue, "nul \0 nul")
        assert held is not None
        assert queue.release([held], error="nul \0") == [Outcome.OK]
        assert queue.get("nul \0") is None


def test_a_deadlock_is_tried_again(backend: PostgresBackend) -> None:
    both_hold_one = threading.Barrier(2, timeout=60)
    hold_first: dict[int, str] = {}
    attempts: list[int] = []

    def clock(db: psycopg.Connection) -> float:
        """Called in each transaction, before its operation. Locks a batch in the first transaction of a thread."""
        thread = threading.get_ident()
        attempts.append(thread)
        if id := hold_first.pop(thread, None):
            db.execute("SELECT seq FROM tandem.batches WHERE id = %s FOR UPDATE", [id])
            both_hold_one.wait()
        return database_time(db)

    def drop(id: str, after_locking: str) -> None:
        hold_first[threading.get_ident()] = after_locking
        queue.drop(id)

    with opened(backend, upkeep_seconds=3600, clock=clock) as queue:
        ready(queue, "a", "b")
        attempts.clear()
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(drop, "a", after_locking="b"), pool.submit(drop, "b", after_locking="a")]:
                done.result(timeout=60)
        assert len(attempts) > 2
        assert state(queue, "a") is state(queue, "b") is State.EXPIRED


def _admits(queue: Queue, upload: Upload) -> bool:
    try:
        return queue.put(upload).created
    except StorageBroken:
        return False


def _waiting_for_locks(backend: PostgresBackend) -> int:
    """How many of the servers' transactions wait for another one."""
    with psycopg.connect(backend.url) as db:
        row = db.execute("""
            SELECT count(DISTINCT pid) FROM pg_locks JOIN pg_stat_activity USING (pid)
            WHERE NOT granted AND datname = current_database()
        """).fetchone()
    assert row is not None
    return row[0]


def _end_others(db: psycopg.Connection) -> None:
    db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


@pytest.fixture
def lazy() -> Iterator[Postgres]:
    """A database that flushes its log only for commits that wait for it."""
    try:
        with postgres(settings=("wal_writer_delay = 10s", "wal_writer_flush_after = 1GB")) as cluster:
            yield cluster
    except PostgresMissing as missing:
        pytest.skip(str(missing))


def test_a_lease_that_was_answered_survives_a_crash_of_the_database(lazy: Postgres) -> None:
    """The servers and the trainers live on: a forgotten lease would be another consumer's, too."""
    with closing(PostgresQueue(lazy.create_database("queue"), limits=make_limits())) as queue:
        ready(queue, "a")
        held = lease(queue)
        assert held is not None
        lazy.restart("immediate")
        until(lambda: not _check(queue))
        assert lease(queue, "other") is None
        assert queue.ack([held]) == [Outcome.OK]
