"""What is forgotten, and when: settled batches, consumers, runs that are over; what waits too long expires."""

from ref_server.metrics import Count
from ref_server.queue.housekeeping import SILENCE_SECONDS, SLICE
from ref_server.queue.queue import WAITING_SECONDS, Queue
from shared.api import Outcome, PurgeBody, State
from tests.ref_server.queue.backends import RETENTION, Clock
from tests.ref_server.queue.batches import (
    expire_waiting,
    key,
    lease,
    lease_many,
    make_ready,
    ready_upload,
    reason,
    state,
    upload,
)


def test_tidying_takes_small_steps(queue: Queue, clock: Clock) -> None:
    """A backlog of a month must not hold up a client."""
    for number in range(SLICE + 50):
        queue.put(ready_upload(str(number)))
    while queue.purge(PurgeBody(state="ready")).next_cursor:
        pass
    clock.advance(RETENTION + 1)
    assert queue.tidy()
    assert len(queue.list(None, None, 1000, None).batches) == 50
    assert not queue.tidy()
    assert queue.stats().runs == {}


def test_a_batch_that_waits_untouched_for_too_long_expires(queue: Queue, clock: Clock) -> None:
    make_ready(queue, *(upload(id) for id in ("released", "leased", "ready")))
    queue.put(upload("queued"))
    clock.advance(WAITING_SECONDS - 1)
    held = lease(queue), lease(queue, lease_seconds=86_400.0)
    queue.tidy()
    assert state(queue, "queued") is State.QUEUED
    queue.release([key(held[0])])
    clock.advance(2)
    queue.tidy()
    expected = {"released": State.READY, "leased": State.LEASED, "ready": State.EXPIRED, "queued": State.EXPIRED}
    assert {id: state(queue, id) for id in expected} == expected
    assert reason(queue, "queued") == reason(queue, "ready") == "unused"
    assert queue.payload("queued") is None
    assert queue.activity.counts()[Count.EXPIRED_UNUSED] == 2


def test_a_requeued_batch_is_no_longer_settled_and_waits_anew(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("a"))
    expire_waiting(queue)
    clock.advance(RETENTION - 1)
    queue.requeue("a")
    clock.advance(WAITING_SECONDS - 1)
    queue.tidy()
    assert state(queue, "a") is State.READY


def test_a_consumer_that_still_leases_is_remembered(queue: Queue, clock: Clock) -> None:
    lease_many(queue, incarnation="old")
    lease_many(queue, incarnation="new")
    for _ in range(4):
        clock.advance(RETENTION / 2)
        lease_many(queue, incarnation="new")
        queue.tidy()
    make_ready(queue, upload("a"))
    held = lease(queue, incarnation="new", lease_seconds=10 * RETENTION)
    clock.advance(RETENTION + 1)
    queue.tidy()
    lease_many(queue, incarnation="newer")
    assert queue.ack([key(held)]) == [Outcome.STALE]


def test_a_run_that_is_over_is_forgotten_after_its_batches(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("a", lineage="one", epoch=1, version=5))
    queue.ack([key(lease(queue, run="run", lineage="one", epoch=1, policy_version=5))])
    queue.finish("run", "one")
    clock.advance(RETENTION)
    queue.tidy()
    assert queue.put(upload("late", lineage="one", epoch=1)).state is State.EXPIRED, "it has finished"
    clock.advance(max(RETENTION, SILENCE_SECONDS) + 1)
    queue.tidy()
    queue.tidy()
    make_ready(queue, upload("new", lineage="one", epoch=1))
    assert lease(queue, run="run", lineage="one", epoch=2, policy_version=9).id == "new"
