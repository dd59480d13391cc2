"""Stored payloads: settled ones make room for new ones, and a run keeps a few trained batches as samples."""

from dataclasses import replace
from hashlib import sha256

import pytest

from ref_server.metrics import Count
from ref_server.queue.errors import NoRoom, WrongState
from ref_server.queue.queue import Queue
from shared.api import LeaseKey, Outcome, State
from tests.ref_server.queue.backends import Clock, Open
from tests.ref_server.queue.batches import details, expire_waiting, key, lease, make_ready, ready_upload, stored, upload

MIB = 2**20


def with_payload(queue: Queue, run: str | None = None) -> set[str]:
    return {batch.id for batch in queue.list(None, run, 1000, None, kept=True).batches}


# --- the limit of all stored payloads


def test_the_payloads_settled_first_make_room(open_queue: Open, clock: Clock) -> None:
    queue = open_queue(max_stored_bytes=40)
    queue.put(ready_upload("late"))  # admitted first, settled last
    held = lease(queue)
    for id in ("first", "second"):
        queue.put(ready_upload(id))
        expire_waiting(queue)
        clock.advance(1.0)
    queue.release([key(held)])
    expire_waiting(queue)
    queue.put(ready_upload("a"))
    assert with_payload(queue) == {"late", "first", "second", "a"}
    queue.put(ready_upload("b", 5))
    assert with_payload(queue) == {"late", "second", "a", "b"}
    queue.put(ready_upload("c", 5))
    assert stored(queue) == 40
    clock.advance(1.0)
    expire_waiting(queue)
    queue.put(ready_upload("d"))
    queue.put(ready_upload("e"))
    assert with_payload(queue) == {"a", "b", "c", "d", "e"}
    assert queue.activity.counts()[Count.PAYLOAD_DROPPED] == 3
    first = details(queue, "first")
    assert (first.state, first.reason, first.payload_bytes) == (State.EXPIRED, "stale", 0)
    assert first.history[-1].detail == "its payload was dropped to make room"
    assert not queue.put(ready_upload("first")).created
    with pytest.raises(WrongState, match="nothing left to queue again"):
        queue.requeue("first")


def test_a_run_that_uses_its_share_leaves_room_for_another(open_queue: Open) -> None:
    queue = open_queue(max_stored_bytes=3000)
    for id in range(150):
        queue.put(ready_upload(f"{id}"))
        queue.extend([key(lease(queue))], 10.0, started=True)
    with pytest.raises(NoRoom) as refused:
        queue.put(ready_upload("more"))
    assert refused.value.run == "run"
    assert queue.put(ready_upload("other", run="other")).created


def test_a_store_far_above_a_new_limit_admits_at_once(open_queue: Open) -> None:
    queue = open_queue()
    for id in range(70):
        queue.put(ready_upload(f"{id}", MIB))
    queue.put(ready_upload("last", MIB))
    expire_waiting(queue)
    queue.close()
    queue = open_queue(max_stored_bytes=2 * MIB)
    assert queue.put(ready_upload("new", MIB)).created
    assert with_payload(queue) == {"last", "new"}


# --- kept samples


def leased(queue: Queue, id: str, run: str = "run") -> LeaseKey:
    queue.put(replace(ready_upload(id, run=run), content_hash=sha256(id.encode()).digest()))
    return key(lease(queue, run=run))


def train(queue: Queue, id: str, training: bytes | None = b"data", run: str = "run") -> LeaseKey:
    """A batch from its upload to its ack."""
    held = leased(queue, id, run)
    if training is not None:
        queue.put_training(id, training)
    assert queue.ack([held], "step-1") == [Outcome.OK]
    return held


@pytest.mark.parametrize("end", ["released", "expired", "failed"])
def test_a_lease_that_ends_without_an_ack_loses_its_training_data(open_queue: Open, clock: Clock, end: str) -> None:
    queue = open_queue()
    held = leased(queue, "a")
    queue.extend([held], 10.0, started=True)
    queue.put_training("a", b"of a step that no checkpoint contains")
    if end == "expired":
        clock.advance(11.0)
    else:
        queue.release([held], error="boom" if end == "failed" else None)
    again = key(lease(queue))
    assert (queue.training("a"), stored(queue)) == (None, 10)
    queue.ack([again])
    assert (queue.payload("a"), stored(queue)) == (None, 0)


def smallest(ids: list[str], number: int) -> set[str]:
    return set(sorted(ids, key=lambda id: sha256(id.encode()).digest())[:number])


def test_a_batch_with_training_data_stays_whole_after_its_ack(open_queue: Open) -> None:
    queue = open_queue(max_batches=3, max_batches_per_run=1, max_in_flight=3, max_in_flight_per_run=1)
    sample = train(queue, "sample")
    train(queue, "other", None)
    assert (queue.payload("other"), queue.training("other")) == (None, None)
    batch = details(queue, "sample")
    assert (batch.state, batch.payload_bytes, batch.history[-1].detail) == (State.DONE, 14, "in checkpoint step-1")
    assert (stored(queue), queue.stats().waiting_batches) == (14, 0)
    queue.close()
    queue = open_queue()
    assert (queue.payload("sample"), queue.training("sample")) == ((b"." * 10, None), b"data")
    assert queue.ack([sample]) == [Outcome.ALREADY]


def test_training_data_needs_a_batch_that_is_leased_or_kept(open_queue: Open) -> None:
    queue = open_queue()
    with pytest.raises(KeyError):
        queue.put_training("unknown", b"data")
    queue.put(ready_upload("a"))
    with pytest.raises(WrongState, match="a is ready: training data is stored while"):
        queue.put_training("a", b"data")
    queue.ack([key(lease(queue))])
    with pytest.raises(WrongState, match="its payload is gone"):
        queue.put_training("a", b"data")
    assert queue.training("unknown") is None


@pytest.mark.parametrize("most", [0, 3])
def test_one_ack_of_many_keeps_as_many(open_queue: Open, most: int) -> None:
    queue = open_queue(keep_samples=most)
    ids = [str(number) for number in range(12)]
    keys = [leased(queue, id) for id in ids]
    for id in ids:
        queue.put_training(id, b"data")
    assert set(queue.ack(keys)) == {Outcome.OK}
    assert with_payload(queue) == smallest(ids, most)
    assert stored(queue) == 14 * most


def test_training_data_that_is_replaced_is_counted_once(queue: Queue) -> None:
    make_ready(queue, upload("a"))
    lease(queue)
    queue.put_training("a", b"first data")
    before = stored(queue)
    queue.put_training("a", b"second")
    assert queue.training("a") == b"second" and stored(queue) == before - len(b"first data") + len(b"second")
