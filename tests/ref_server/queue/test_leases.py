"""Leases: their order, how long they hold, what ends them, and what a repeated request gets."""

import threading
from collections import Counter
from collections.abc import Callable

import pytest

from ref_server.metrics import Count
from ref_server.queue.errors import Superseded
from ref_server.queue.queue import Queue
from shared.api import Lease, LeaseKey, Order, Outcome, State
from tests.ref_server.queue.backends import Clock, Open
from tests.ref_server.queue.batches import (
    LEASE_SECONDS,
    details,
    drain,
    key,
    lease,
    lease_many,
    lose,
    make_ready,
    reason,
    state,
    upload,
)


def ids(leases: list[Lease]) -> list[str]:
    return [held.id for held in leases]


def fill(queue: Queue, names: str, **fields) -> None:
    make_ready(queue, *(upload(name, **fields) for name in names))


# --- the order


@pytest.mark.parametrize("order", Order)
def test_returned_batches_come_first_in_their_old_order(queue: Queue, clock: Clock, order: Order) -> None:
    make_ready(queue, *(upload(id, version=version) for id, version in (("a", 1), ("b", 2), ("c", 3), ("d", 4))))
    first, second = lease(queue, order=order), lease(queue, order=order)
    make_ready(queue, upload("newest", version=9))
    queue.release([key(second)])
    clock.advance(LEASE_SECONDS)
    assert drain(queue, order=order)[:2] == [first.id, second.id]


def test_a_batch_is_leased_to_one_consumer_at_a_time(queue: Queue) -> None:
    make_ready(queue, *(upload(str(number)) for number in range(40)))
    leased: list[str] = []
    threads = [
        threading.Thread(target=lambda name=name: leased.extend(drain(queue, consumer=name))) for name in "abcdefgh"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(leased) == {str(number): 1 for number in range(40)}


# --- how long a lease holds


def test_a_lease_holds_for_its_time(queue: Queue, clock: Clock) -> None:
    fill(queue, "a")
    held = lease(queue, consumer="me", lease_seconds=3.0)
    assert (held.id, held.lease_seconds, held.deliveries, held.body, held.scores) == ("a", 3.0, 1, b"raw", b"scores.")
    assert details(queue, "a").consumer == "me"
    clock.advance(2.9)
    assert lease_many(queue) == []
    clock.advance(0.1)
    assert queue.stats().runs["run"].keys() == {State.READY}
    again = lease(queue)
    assert again.id == held.id
    assert again.token != held.token


# --- what counts as a delivery


def lost(queue: Queue, clock: Clock, started: bool) -> None:
    held = key(lease(queue))
    queue.extend([held], LEASE_SECONDS, started=started)
    queue.extend([held], LEASE_SECONDS)  # does not undo that training has started
    clock.advance(LEASE_SECONDS)


def superseded(queue: Queue, clock: Clock, started: bool) -> None:
    queue.extend([key(lease(queue, incarnation="old"))], LEASE_SECONDS, started=started)
    queue.release([key(lease(queue, incarnation="new"))])


def released(queue: Queue, clock: Clock, started: bool) -> None:
    held = key(lease(queue))
    queue.extend([held], LEASE_SECONDS, started=started)
    queue.release([held])


@pytest.mark.parametrize(
    ("end", "counts"), [(lost, lambda started: started), (superseded, lambda started: started), (released, lambda _: 0)]
)
@pytest.mark.parametrize("started", [False, True])
def test_a_lost_lease_counts_as_a_delivery_once_training_has_started(
    queue: Queue, clock: Clock, end: Callable[..., None], counts: Callable[[bool], int], started: bool
) -> None:
    fill(queue, "a")
    end(queue, clock, started)
    assert lease(queue).deliveries == 1 + counts(started)


def test_a_batch_is_dead_after_max_deliveries(open_queue: Open, clock: Clock) -> None:
    queue = open_queue(max_deliveries=2)
    fill(queue, "a")
    lose(queue, clock, started=True)
    assert state(queue, "a") is State.READY
    lose(queue, clock, started=False)
    lose(queue, clock, started=True)
    assert lease_many(queue) == []
    batch = details(queue, "a")
    assert (batch.state, batch.deliveries) == (State.DEAD, 2)
    assert "trainer lost" in (batch.reason or "")
    assert queue.payload("a") == (b"raw", b"scores.")


def test_a_release_with_an_error_counts_and_is_the_reason(open_queue: Open) -> None:
    queue = open_queue(max_deliveries=2)
    fill(queue, "a")
    queue.release([key(lease(queue))], error="first NaN")
    assert queue.release([key(lease(queue))], error="second NaN") == [Outcome.OK]
    assert state(queue, "a") is State.DEAD
    assert "second NaN" in (reason(queue, "a") or "")


# --- outcomes


def test_an_ack_settles_for_good(queue: Queue, clock: Clock) -> None:
    fill(queue, "a")
    held = key(lease(queue))
    assert queue.ack([held], checkpoint="step-7") == [Outcome.OK]
    clock.advance(LEASE_SECONDS)
    batch = details(queue, "a")
    assert (batch.state, batch.payload_bytes, batch.consumer) == (State.DONE, 0, "trainer")
    assert "step-7" in batch.history[-1].detail
    assert queue.payload("a") is None
    assert queue.ack([held]) == queue.extend([held], 1.0) == queue.release([held], error="late") == [Outcome.ALREADY]
    assert state(queue, "a") is State.DONE


@pytest.mark.parametrize("token", ["", "wrong", "fälschlich"])
def test_a_wrong_token_is_stale(queue: Queue, token: str) -> None:
    make_ready(queue, upload("leased"), upload("ready"))
    lease(queue)
    assert queue.ack([LeaseKey(id=id, token=token) for id in ("leased", "ready")]) == [Outcome.STALE] * 2


def test_outcomes_come_in_the_order_of_the_keys(queue: Queue) -> None:
    make_ready(queue, *(upload(str(number)) for number in range(300)))
    keys = [key(held) for held in lease_many(queue, count=300)][::-1]
    requested = [*keys, keys[0], LeaseKey(id="0", token="wrong"), LeaseKey(id="nobody", token="x")]
    assert queue.ack(requested) == [*[Outcome.OK] * 300, Outcome.ALREADY, Outcome.STALE, Outcome.UNKNOWN]
    assert queue.ack([]) == []


# --- several batches in one request


def test_a_repeated_request_gets_the_leases_that_still_hold(queue: Queue, clock: Clock) -> None:
    fill(queue, "abcd")
    first = lease_many(queue, count=3, request_id="r")
    clock.advance(LEASE_SECONDS - 1)
    assert lease_many(queue, count=3, request_id="r", lease_seconds=99.0) == first
    assert lease_many(queue, count=2, request_id="r") == first[:2], "fewer are wanted"
    queue.ack([key(first[0])])
    queue.release([key(first[1])])
    assert lease_many(queue, count=3, request_id="r") == first[2:], "and nothing new"
    assert ids(lease_many(queue, "another", count=3, request_id="r")) == ["b", "d"]
    clock.advance(1)  # the repetition did not extend the lease
    [again] = lease_many(queue, count=3, request_id="r")
    assert (again.id, again.token != first[2].token) == ("c", True)


def test_a_new_incarnation_gets_the_leases_of_the_old_one(open_queue: Open) -> None:
    queue = open_queue(max_in_flight=6)
    fill(queue, "abcd")
    old = lease_many(queue, incarnation="one", count=2, request_id="x")
    anonymous = lease(queue)
    assert ids(lease_many(queue, incarnation="two", count=3, request_id="x")) == ["a", "b", "c"]
    assert queue.ack([key(held) for held in (*old, anonymous)]) == [Outcome.STALE] * 3
    with pytest.raises(Superseded):
        lease_many(queue, incarnation="one")


def test_each_batch_of_a_request_is_a_lease_of_its_own(queue: Queue) -> None:
    fill(queue, "abc")
    held = lease_many(queue, count=3, lease_seconds=7.5)
    assert [(each.id, each.lease_seconds, each.deliveries, (each.body, each.scores)) for each in held] == [
        (name, 7.5, 1, queue.payload(name)) for name in "abc"
    ]
    assert len({each.token for each in held}) == 3
    a, b, c = map(key, held)
    assert queue.ack([a]) == queue.release([b]) == queue.extend([c], 60.0, started=True) == [Outcome.OK]
    assert [state(queue, name) for name in "abc"] == [State.DONE, State.READY, State.LEASED]
    assert details(queue, "c").history[-1].detail == "to trainer"
    assert queue.activity.counts()[Count.LEASED] == 3
    assert ids(lease_many(queue, count=9)) == ["b"]
    assert queue.activity.counts()[Count.REDELIVERED] == 1


@pytest.mark.parametrize(("most", "held"), [(30, "abc"), (29, "ab"), (10, "a"), (9, "a")])
def test_an_answer_is_bounded_in_bytes_but_never_empty(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, most: int, held: str
) -> None:
    monkeypatch.setattr("ref_server.queue.grants.MAX_LEASE_BYTES", most)
    fill(queue, "abcd")  # 10 bytes each
    assert ids(lease_many(queue, count=4)) == list(held)


def test_payloads_come_along_up_to_a_sum(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(queue, "abc")
    bodies = queue.payloads("abc")
    monkeypatch.setattr("ref_server.queue.grants.LARGE_BYTES", 20)  # 10 bytes each
    held = lease_many(queue, count=3)
    assert [(each.body, each.scores) for each in held] == [bodies["a"], bodies["b"], (None, None)]
    assert queue.payloads([held[2].id, "unknown"]) == {"c": bodies["c"]}
    queue.ack([key(held[2])])
    assert queue.payloads("abc") == {"a": bodies["a"], "b": bodies["b"]}
