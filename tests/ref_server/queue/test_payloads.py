"""The limit of all stored payloads: settled ones make room, what is in use stays."""

import pytest

from ref_server.metrics.activity import Count
from ref_server.queue.errors import NoRoom, QueueFull, WrongState
from ref_server.queue.queue import Queue
from ref_server.queue.records import Upload
from shared.api import Lease, LeaseBody, LeaseKey, State
from tests.ref_server.queue.backends import Clock, Open

MIB = 2**20


def upload(id: str, size: int = 10, run: str = "run") -> Upload:
    return Upload(id, bytes(32), run, 0, 0, 4, 6, 2, b"." * size, to_score=False)


def expire_all(queue: Queue, run: str = "run") -> None:
    """Makes all that waits stale."""
    queue.lease(LeaseBody(consumer="trainer", run=run, policy_version=9, max_lag=0))


def lease(queue: Queue, run: str = "run") -> Lease:
    (held,) = queue.lease(LeaseBody(consumer="trainer", run=run, lease_seconds=10.0))
    return held


def start(queue: Queue, held: Lease) -> None:
    queue.extend([LeaseKey(id=held.id, token=held.token)], 10.0, started=True)


def with_payload(queue: Queue) -> set[str]:
    return {batch.id for batch in queue.list(None, None, 1000, None).batches if queue.payload(batch.id) is not None}


def stored(queue: Queue) -> int:
    return sum(depth.bytes for states in queue.stats().runs.values() for depth in states.values())


def test_payloads_settled_first_make_room(open_queue: Open, clock: Clock) -> None:
    queue = open_queue(max_stored_bytes=40)
    queue.put(upload("late"))  # admitted first, settled last
    held = lease(queue)
    for id in ("first", "second"):
        queue.put(upload(id))
        expire_all(queue)
        clock.advance(1.0)
    queue.release([LeaseKey(id="late", token=held.token)])
    expire_all(queue)
    queue.put(upload("a"))
    assert with_payload(queue) == {"late", "first", "second", "a"}
    queue.put(upload("b", 5))
    assert with_payload(queue) == {"late", "second", "a", "b"}
    queue.put(upload("c", 5))
    assert stored(queue) == 40
    clock.advance(1.0)
    expire_all(queue)
    queue.put(upload("d"))
    queue.put(upload("e"))
    assert with_payload(queue) == {"a", "b", "c", "d", "e"}
    assert queue.activity.counts()[Count.PAYLOAD_DROPPED] == 3


def test_a_batch_whose_payload_made_room_is_known_and_says_so(open_queue: Open) -> None:
    queue = open_queue(max_stored_bytes=20)
    queue.put(upload("a"))
    expire_all(queue)
    queue.put(upload("b"))
    expire_all(queue)
    queue.put(upload("c"))
    batch = queue.get("a")
    assert batch is not None
    assert (batch.state, batch.reason, batch.payload_bytes) == (State.EXPIRED, "stale", 0)
    assert batch.history[-1].detail == "its payload was dropped to make room"
    assert not queue.put(upload("a")).created
    with pytest.raises(WrongState, match="nothing left to queue again"):
        queue.requeue("a")


def test_dead_batches_make_room(open_queue: Open) -> None:
    queue = open_queue(max_stored_bytes=20, max_deliveries=1)
    queue.put(upload("a"))
    queue.release([LeaseKey(id="a", token=lease(queue).token)], error="boom")
    queue.put(upload("b"))
    expire_all(queue)
    queue.put(upload("c"))
    assert with_payload(queue) == {"b", "c"}


def test_what_is_in_use_is_never_dropped(open_queue: Open) -> None:
    queue = open_queue(max_stored_bytes=40)
    queue.put(upload("a"))
    start(queue, lease(queue))  # it no longer counts as waiting, but it is stored
    queue.put(upload("b"))
    with pytest.raises(QueueFull, match="max_stored_bytes is 40"):
        queue.put(upload("c"))
    assert with_payload(queue) == {"a", "b"}
    assert queue.get("c") is None


def test_a_run_that_uses_its_share_leaves_room_for_another(open_queue: Open) -> None:
    queue = open_queue(max_stored_bytes=3000)
    for id in range(150):
        queue.put(upload(f"{id}"))
        start(queue, lease(queue))
    with pytest.raises(NoRoom) as refused:
        queue.put(upload("more"))
    assert refused.value.run == "run"
    assert queue.put(upload("other", run="other")).created


def test_a_batch_that_grows_when_it_is_scored_makes_room(open_queue: Open) -> None:
    queue = open_queue(max_stored_bytes=40)
    for id in "ab":
        queue.put(upload(id))
    expire_all(queue)
    queue.put(Upload("c", bytes(32), "run", 0, 0, 4, 6, 2, b"." * 10))
    queue.claim(100)
    queue.complete("c", b"." * 25)
    assert with_payload(queue) == {"b", "c"}


def test_a_scored_batch_is_kept_though_nothing_can_make_room(open_queue: Open) -> None:
    queue = open_queue(max_stored_bytes=20)
    queue.put(Upload("a", bytes(32), "run", 0, 0, 4, 6, 2, b"." * 10))
    queue.claim(100)
    queue.complete("a", b"." * 25)
    assert queue.payload("a") == b"." * 25


def test_a_large_upload_displaces_any_number_of_small_payloads(open_queue: Open) -> None:
    queue = open_queue(max_stored_bytes=400)
    for id in range(100):
        queue.put(upload(f"{id}", 2))
    expire_all(queue)
    assert queue.put(upload("large", 200)).created
    assert stored(queue) == 400
    queue.drop("large")
    assert queue.put(upload("again", 200)).created
    expire_all(queue)
    assert queue.put(upload("other", 200)).created
    assert with_payload(queue) == {"again", "other"}


def test_a_store_far_above_a_new_limit_admits_at_once(open_queue: Open) -> None:
    """As after an upgrade from a version that had no limit."""
    queue = open_queue()
    for id in range(70):
        queue.put(upload(f"{id}", MIB))
    queue.put(upload("last", MIB))
    expire_all(queue)
    queue.close()
    queue = open_queue(max_stored_bytes=2 * MIB)
    assert queue.put(upload("new", MIB)).created
    assert with_payload(queue) == {"last", "new"}


def test_the_oldest_legacy_batch_makes_room_where_nothing_settled_does(open_queue: Open) -> None:
    queue = open_queue(max_stored_bytes=20)
    assert queue.put_displacing(upload("a")) == []
    assert queue.put_displacing(upload("b")) == ["a"]
    assert with_payload(queue) == {"b"}
