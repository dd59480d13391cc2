"""Kept samples: trained batches that stay whole after their ack, a few of a run, and go when others need the room."""

from hashlib import sha256

import pytest

from ref_server.queue.errors import NoRoom, QueueFull, WrongState
from ref_server.queue.queue import Queue
from ref_server.queue.records import Upload
from shared.api import LeaseBody, LeaseKey, ListOrder, Outcome, State
from tests.ref_server.queue.backends import RETENTION, Clock, Open


def upload(id: str, run: str = "run", size: int = 10) -> Upload:
    return Upload(id, sha256(id.encode()).digest(), run, 0, 0, 4, 6, 2, b"." * size, to_score=False)


def lease(queue: Queue, run: str = "run") -> LeaseKey:
    (held,) = queue.lease(LeaseBody(consumer="trainer", run=run, lease_seconds=10.0))
    return LeaseKey(id=held.id, token=held.token)


def leased(queue: Queue, id: str, run: str = "run") -> LeaseKey:
    queue.put(upload(id, run))
    return lease(queue, run)


def train(queue: Queue, id: str, training: bytes | None = b"told", run: str = "run") -> LeaseKey:
    """A batch from its upload to its ack."""
    key = leased(queue, id, run)
    if training is not None:
        queue.put_training(id, training)
    assert queue.ack([key], "step-1") == [Outcome.OK]
    return key


def kept(queue: Queue, run: str | None = None) -> list[str]:
    return [batch.id for batch in queue.list(None, run, 1000, None, kept=True).batches]


def stored(queue: Queue) -> int:
    return sum(depth.bytes for states in queue.stats().runs.values() for depth in states.values())


def test_what_training_told_of_stays_whole_after_the_ack(open_queue: Open) -> None:
    queue = open_queue()
    sample = train(queue, "sample")
    train(queue, "other", None)
    assert (queue.payload("sample"), queue.training("sample")) == (b"." * 10, b"told")
    assert (queue.payload("other"), queue.training("other")) == (None, None)
    batch = queue.get("sample")
    assert batch is not None
    assert (batch.state, batch.payload_bytes, batch.history[-1].detail) == (State.DONE, 14, "in checkpoint step-1")
    assert stored(queue) == 14
    assert queue.ack([sample]) == [Outcome.ALREADY]
    assert not queue.put(upload("sample")).created
    assert queue.payload("sample") == b"." * 10


def test_a_restart_keeps_it(open_queue: Open) -> None:
    queue = open_queue()
    train(queue, "sample")
    queue.close()
    queue = open_queue()
    assert (queue.payload("sample"), queue.training("sample")) == (b"." * 10, b"told")


def test_it_does_not_count_as_waiting(open_queue: Open) -> None:
    queue = open_queue(max_batches=3, max_batches_per_run=1, max_in_flight=3, max_in_flight_per_run=1)
    for id in map(str, range(5)):
        train(queue, id)
    assert queue.put(upload("more")).created
    assert queue.stats().waiting_batches == 1


def test_told_again_the_last_holds(open_queue: Open) -> None:
    queue = open_queue()
    key = leased(queue, "a")
    queue.put_training("a", b"a longer one")
    queue.put_training("a", b"short")
    assert (queue.training("a"), stored(queue)) == (b"short", 15)
    queue.ack([key])
    queue.put_training("a", b"later")
    assert (queue.training("a"), stored(queue)) == (b"later", 15)


def test_only_of_a_batch_that_is_leased_or_kept(open_queue: Open) -> None:
    queue = open_queue()
    with pytest.raises(KeyError):
        queue.put_training("unknown", b"told")
    queue.put(upload("a"))
    with pytest.raises(WrongState, match="a is ready: training data is stored while"):
        queue.put_training("a", b"told")
    queue.ack([lease(queue)])
    with pytest.raises(WrongState, match="its payload is gone"):
        queue.put_training("a", b"told")
    assert queue.training("unknown") is None


@pytest.mark.parametrize("lost", ["released", "expired", "failed"])
def test_a_lease_that_ends_otherwise_takes_it_away(open_queue: Open, clock: Clock, lost: str) -> None:
    """The batch is trained again, perhaps in a step that nobody looks at."""
    queue = open_queue()
    key = leased(queue, "a")
    queue.extend([key], 10.0, started=True)
    queue.put_training("a", b"of a step that no checkpoint has")
    if lost == "expired":
        clock.advance(11.0)
    else:
        queue.release([key], error="boom" if lost == "failed" else None)
    again = lease(queue)
    assert (queue.training("a"), stored(queue)) == (None, 10)
    queue.ack([again])
    assert (queue.payload("a"), stored(queue)) == (None, 0)


def test_a_run_keeps_those_with_the_smallest_hashes(open_queue: Open) -> None:
    queue = open_queue(keep_samples=3)
    ids = [str(number) for number in range(12)]
    for id in ids:
        train(queue, id)
        train(queue, f"other {id}", run="other")
    smallest = sorted(ids, key=lambda id: sha256(id.encode()).digest())[:3]
    assert set(kept(queue, "run")) == set(smallest)
    assert len(kept(queue, "other")) == 3
    gone = queue.get(next(id for id in ids if id not in smallest))
    assert gone is not None
    assert (gone.state, gone.payload_bytes) == (State.DONE, 0)
    assert gone.history[-1].detail == "its payload was dropped: the run keeps 3 samples"


def test_many_acks_at_once_keep_as_many(open_queue: Open) -> None:
    queue = open_queue(keep_samples=3)
    keys = []
    for id in map(str, range(12)):
        keys.append(leased(queue, id))
        queue.put_training(id, b"told")
    assert set(queue.ack(keys)) == {Outcome.OK}
    assert set(kept(queue)) == set(sorted(map(str, range(12)), key=lambda id: sha256(id.encode()).digest())[:3])


def test_a_server_may_keep_none(open_queue: Open) -> None:
    queue = open_queue(keep_samples=0)
    train(queue, "a")
    assert (kept(queue), stored(queue)) == ([], 0)


def test_a_lower_bound_holds_from_the_next_ack(open_queue: Open) -> None:
    queue = open_queue()
    for id in map(str, range(5)):
        train(queue, id)
    queue.close()
    queue = open_queue(keep_samples=2)
    train(queue, "5")
    assert len(kept(queue)) == 2


def test_kept_samples_make_room(open_queue: Open, clock: Clock) -> None:
    queue = open_queue(max_stored_bytes=40)
    for id in "abc":
        train(queue, id)
        clock.advance(1.0)
    assert (kept(queue), stored(queue)) == (["b", "c"], 28), "a made room for c's training"
    queue.put(upload("d"))
    queue.put(upload("e"))
    assert kept(queue) == ["c", "d", "e"]
    assert queue.training("b") is None


def test_training_needs_room_as_all_that_is_stored(open_queue: Open) -> None:
    queue = open_queue(max_stored_bytes=25)
    leased(queue, "a")
    with pytest.raises((QueueFull, NoRoom), match="max_stored_bytes is 25"):
        queue.put_training("a", b"." * 16)
    assert (queue.training("a"), stored(queue)) == (None, 10)
    queue.put_training("a", b"." * 15)
    assert stored(queue) == 25


def test_a_dropped_sample_stays_done(open_queue: Open) -> None:
    queue = open_queue()
    train(queue, "a")
    queue.drop("a")
    queue.drop("a")
    batch = queue.get("a")
    assert batch is not None
    assert (batch.state, batch.reason, batch.payload_bytes, stored(queue)) == (State.DONE, None, 0, 0)
    assert [event.detail for event in batch.history[-2:]] == ["in checkpoint step-1", "its payload was dropped"]
    assert queue.training("a") is None


def test_it_is_forgotten_with_its_batch(open_queue: Open, clock: Clock) -> None:
    queue = open_queue()
    train(queue, "a")
    clock.advance(RETENTION + 1)
    queue.tidy()
    assert (queue.get("a"), queue.payload("a"), stored(queue)) == (None, None, 0)


def test_a_list_of_those_with_payload_goes_page_by_page_in_both_orders(open_queue: Open) -> None:
    queue = open_queue()
    for id in "abcdef":
        train(queue, id, b"told" if id in "ace" else None)
    queue.put(upload("g"))
    queue.put(upload("h", run="other"))
    for order, whole in ((ListOrder.OLDEST, "acegh"), (ListOrder.NEWEST, "hgeca")):
        listed, cursor = "", None
        while True:
            page = queue.list(None, None, 2, cursor, order, kept=True)
            listed += "".join(batch.id for batch in page.batches)
            if (cursor := page.next_cursor) is None:
                break
        assert listed == whole
    assert [batch.id for batch in queue.list(State.DONE, "run", 9, None, kept=True).batches] == ["a", "c", "e"]
