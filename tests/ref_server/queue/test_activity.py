"""What a queue says it has done: all that was committed, and nothing else."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ref_server.metrics.activity import Count
from ref_server.queue.errors import QueueFull, Superseded
from ref_server.queue.queue import Queue
from ref_server.queue.records import Upload
from ref_server.queue.sqlite.store import SqliteQueue
from shared.api import Lease, LeaseBody, LeaseKey
from tests.ref_server.queue.backends import Backend, Clock, make_limits

LIMITS = make_limits(max_batches=6, max_deliveries=2, max_scoring_attempts=1)


@pytest.fixture
def queue(backend: Backend, clock: Clock) -> Iterator[Queue]:
    with closing(backend.open(clock, LIMITS)) as queue:
        yield queue


def upload(id: str, *, run: str = "run", version: int = 0) -> Upload:
    return Upload(
        id=id,
        content_hash=bytes(32),
        run=run,
        epoch=0,
        policy_version=version,
        prompt_tokens=4,
        completion_tokens=6,
        completions=2,
        body=b"raw",
    )


def make_ready(queue: Queue, *uploads: Upload) -> None:
    for each in uploads:
        queue.put(each)
    for claim in queue.claim(1_000_000):
        queue.complete(claim.id, b"scored")


def keys(leases: list[Lease]) -> list[LeaseKey]:
    return [LeaseKey(id=held.id, token=held.token) for held in leases]


def counted(queue: Queue) -> dict[Count, int]:
    """Only what happened at all."""
    return {count: times for count, times in queue.activity.counts().items() if times}


def sample(queue: Queue, name: str, **labels: str) -> float | None:
    return queue.activity.registry.get_sample_value(name, labels)


def test_a_batch_that_goes_well(queue: Queue, clock: Clock) -> None:
    queue.put(upload("a"))
    queue.put(upload("a"))
    clock.advance(3.0)
    queue.claim(100)
    queue.complete("a", b"scored")
    request = LeaseBody(consumer="c", request_id="once")
    leased = queue.lease(request)
    assert queue.lease(request) == leased
    queue.ack(keys(leased))
    queue.ack(keys(leased))
    once = (Count.ADMITTED, Count.DUPLICATE, Count.LEASED, Count.ACKED)
    assert counted(queue) == dict.fromkeys(once, 1)
    assert sample(queue, "tandem_admission_to_ready_seconds_sum") == pytest.approx(3.0)


def test_batches_that_come_again(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("a"))
    queue.release(keys(queue.lease(LeaseBody(consumer="c"))))
    queue.lease(LeaseBody(consumer="c", incarnation="first life", lease_seconds=5.0))
    clock.advance(6.0)
    queue.lease(LeaseBody(consumer="c", incarnation="first life"))
    queue.lease(LeaseBody(consumer="c", incarnation="second life"))
    assert counted(queue) == {
        Count.ADMITTED: 1,
        Count.LEASED: 4,
        Count.REDELIVERED: 3,
        Count.RELEASED: 1,
        Count.LEASE_EXPIRED: 1,
        Count.LEASE_SUPERSEDED: 1,
    }


def test_batches_that_end_badly(queue: Queue) -> None:
    for id in ("poison", "dropped", "requeued"):
        queue.put(upload(id, run="other"))
    queue.drop("dropped")
    queue.drop("dropped")
    queue.claim(100)
    queue.fail("poison", "no")
    queue.fail("requeued", "no")
    queue.requeue("requeued")
    queue.drop("requeued")
    make_ready(queue, upload("breaks"), upload("stale"), upload("abandoned", version=8))
    for _ in range(LIMITS.max_deliveries):
        queue.release(keys(queue.lease(LeaseBody(consumer="c", run="run"))), "it breaks")
    queue.lease(LeaseBody(consumer="c", run="run", epoch=1, policy_version=5, max_lag=1))
    happened = counted(queue)
    assert happened[Count.DEAD_SCORING] == 2
    assert happened[Count.REQUEUED] == 1
    assert happened[Count.EXPIRED_DROPPED] == 2
    assert happened[Count.DEAD_TRAINING] == 1
    assert happened[Count.EXPIRED_STALE] == 1
    assert happened[Count.EXPIRED_ABANDONED] == 1


def test_what_is_undone_was_never_done(queue: Queue, clock: Clock) -> None:
    """A lease whose time is over is taken back by the operation that finds it, and stays when that fails."""
    queue.put(upload("a"))
    queue.lease(LeaseBody(consumer="c", incarnation="first life"))
    queue.lease(LeaseBody(consumer="c", incarnation="second life"))
    make_ready(queue, upload("b"), upload("c"))
    queue.lease(LeaseBody(consumer="other", lease_seconds=5.0))
    before = counted(queue)
    clock.advance(6.0)
    with pytest.raises(QueueFull):
        queue.put(upload("d"))
    with pytest.raises(Superseded):
        queue.lease(LeaseBody(consumer="c", incarnation="first life"))
    assert counted(queue) == before
    queue.stats()
    assert counted(queue) == before | {Count.LEASE_EXPIRED: 1}


def test_durable_commits_are_timed(queue: Queue) -> None:
    queue.put(upload("a"))
    queue.stats()
    queue.check()
    assert sample(queue, "tandem_commit_seconds_count") == 2
    assert sample(queue, "tandem_commit_operations_bucket", le="1.0") == 2


def test_a_batch_that_ends_its_server_is_counted_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"
    with closing(SqliteQueue(path, limits=make_limits(max_deliveries=1))) as queue:
        queue.put(upload("a"))
        queue.claim(100)
    with closing(SqliteQueue(path, limits=make_limits(max_deliveries=1))) as queue:
        assert counted(queue) == {Count.DEAD_INTERRUPTED: 1}


def test_what_waits_is_what_the_bounds_count(queue: Queue) -> None:
    make_ready(queue, upload("a"), upload("b"))
    assert (queue.stats().waiting_batches, queue.stats().waiting_bytes) == (2, 2 * len(b"scored"))
    leased = keys(queue.lease(LeaseBody(consumer="c")))
    assert queue.stats().waiting_batches == 2
    queue.extend(leased, 9.0, started=True)
    assert queue.stats().waiting_batches == 1
    queue.ack(keys(queue.lease(LeaseBody(consumer="c"))))
    assert (queue.stats().waiting_batches, queue.stats().waiting_bytes) == (0, 0)
