"""What every queue promises, whatever stores it."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import count

import pytest
import structlog

from ref_server.metrics.activity import Count
from ref_server.queue.errors import (
    ContentConflict,
    EpochAhead,
    NoRoom,
    QueueFull,
    StorageBroken,
    Superseded,
    TooManyInFlight,
    WrongState,
)
from ref_server.queue.housekeeping import SILENCE_SECONDS, SLICE
from ref_server.queue.queue import WAITING_SECONDS, Queue
from ref_server.queue.records import Upload, Wanted
from ref_server.queue.transaction import KEPT_EVENTS
from shared.api import LEGACY_RUN, Depth, Lease, LeaseBody, LeaseKey, ListOrder, Order, Outcome, State, Uploaded
from tests.ref_server.queue.backends import RETENTION, Backend, Clock, Open, make_limits

LEASE_SECONDS = 10.0


@pytest.fixture
def queue(open_queue: Open) -> Queue:
    return open_queue()


def upload(
    id: str,
    *,
    run: str = "run",
    lineage: str = "",
    epoch: int = 0,
    version: int = 0,
    tokens: int = 10,
    body: bytes = b"raw",
    uploader: str = "",
) -> Upload:
    return Upload(
        id=id,
        content_hash=body.ljust(32, b"."),
        run=run,
        lineage=lineage,
        epoch=epoch,
        policy_version=version,
        prompt_tokens=4,
        completion_tokens=tokens - 4,
        completions=2,
        body=body,
        uploader=uploader,
    )


def make_ready(queue: Queue, *uploads: Upload) -> None:
    for each in uploads:
        queue.put(each)
    while claims := queue.claim(1_000_000):
        for claim in claims:
            queue.complete(claim.id, b"scored " + claim.body)


def ask(queue: Queue, consumer: str = "trainer", **request) -> Lease | None:
    return next(iter(ask_many(queue, consumer, **request)), None)


def ask_many(queue: Queue, consumer: str = "trainer", **request) -> list[Lease]:
    return queue.lease(LeaseBody(consumer=consumer, **{"lease_seconds": LEASE_SECONDS, **request}))


def lease(queue: Queue, consumer: str = "trainer", **request) -> Lease:
    held = ask(queue, consumer, **request)
    assert held is not None
    return held


def key(held: Lease) -> LeaseKey:
    return LeaseKey(id=held.id, token=held.token)


def drain(queue: Queue, **request) -> list[str]:
    """The ids in the order in which they are leased."""
    return [held.id for held in iter(lambda: ask(queue, **request), None)]


def state(queue: Queue, id: str) -> State:
    info = queue.get(id)
    assert info is not None
    return info.state


def reason(queue: Queue, id: str) -> str | None:
    info = queue.get(id)
    assert info is not None
    return info.reason


def lose(queue: Queue, clock: Clock, *, started: bool, **request) -> None:
    """Leases one batch, and lets the lease run out."""
    held = lease(queue, **request)
    queue.extend([key(held)], LEASE_SECONDS, started=started)
    clock.advance(LEASE_SECONDS)


# --- what waiting requests could get


def test_a_look_tells_how_many_could_be_leased_to_those_who_wait(open_queue: Open) -> None:
    queue = open_queue(max_in_flight=8)
    make_ready(queue, *(upload(f"{run} {epoch}", run=run, epoch=epoch) for run in "ab" for epoch in range(3)))
    queue.put(upload("not scored", run="c"))
    every, first = Wanted("a"), Wanted("a", epoch=0)
    waiting = {every: 5, first: 5, Wanted("b"): 1, Wanted("c"): 1, Wanted("a", "other"): 1, Wanted(None): 9}
    assert queue.look(waiting, []) == {every: 3, first: 1, Wanted("b"): 1, Wanted(None): 6}
    lease(queue, run="a")
    assert queue.look({every: 5}, []) == {every: 2}
    for _ in range(2):
        lease(queue, run="b")
    assert queue.look({every: 5, Wanted("b"): 5, Wanted(None): 9}, []) == {every: 2, Wanted("b"): 1, Wanted(None): 3}


def test_a_look_takes_back_leases_that_ran_out(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("a"))
    lease(queue)
    assert queue.look({Wanted("run"): 1}, []) == {}
    clock.advance(LEASE_SECONDS)
    assert queue.look({Wanted("run"): 1}, []) == {Wanted("run"): 1}


# --- admission


def test_an_upload_is_queued(queue: Queue) -> None:
    assert queue.put(upload("a")) == Uploaded(id="a", state=State.QUEUED, created=True)


def test_uploading_the_same_again_tells_its_state(queue: Queue) -> None:
    make_ready(queue, upload("a"))
    assert queue.put(upload("a")) == Uploaded(id="a", state=State.READY, created=False)


def test_the_same_id_with_other_content_is_refused(queue: Queue) -> None:
    queue.put(upload("a"))
    with pytest.raises(ContentConflict):
        queue.put(upload("a", body=b"other"))
    assert queue.payload("a") == b"raw"


@pytest.mark.parametrize(
    "limits", [{"max_batches": 2}, {"max_bytes": 11}, {"max_batches_per_run": 1}, {"max_bytes_per_run": 5}]
)
def test_a_full_queue_refuses_naming_the_limit(open_queue: Open, limits: dict[str, int]) -> None:
    queue = open_queue(**limits)
    queue.put(upload("a"))
    [(limit, value)] = limits.items()
    with pytest.raises(QueueFull, match=f"{limit} is {value}"):
        queue.put(upload("b"))
    assert queue.get("b") is None


def test_a_full_queue_knows_what_it_has(open_queue: Open) -> None:
    queue = open_queue(max_batches=2)
    queue.put(upload("a"))
    assert not queue.put(upload("a")).created


def test_a_full_run_leaves_room_for_another(open_queue: Open) -> None:
    queue = open_queue(max_batches_per_run=1)
    queue.put(upload("a", run="one"))
    assert queue.put(upload("b", run="two")).created


def test_a_run_may_have_as_many_as_are_free(open_queue: Open) -> None:
    """One run alone gets half, two a third each; a third run finds a place at once."""
    queue = open_queue(max_batches=12)
    assert fill(queue, "one") == 6
    assert fill(queue, "two") == 3
    for id in ("one 0", "one 1"):
        queue.drop(id)
    assert fill(queue, "two") == 1, "they get alike: four each, and four are free"
    assert fill(queue, "one") == 0
    assert fill(queue, "three") == 2


def test_a_token_gets_no_more_by_naming_runs(backend: Backend, clock: Clock) -> None:
    limits = make_limits(max_batches=400)
    with closing(backend.open(clock, limits)) as queue, pytest.raises(NoRoom, match="299 of all runs of its token"):
        for i in range(400):
            queue.put(upload(f"{i}", run=f"made up {i}", uploader="one"))
    with closing(backend.open(clock, limits)) as queue:
        queue.drop("0")
        assert fill(queue, "again", uploader="one") == 1
        assert fill(queue, "honest", uploader="two") == 50
        assert fill(queue, "third", uploader="three") == 25


@pytest.mark.parametrize("limit", ["max_bytes", "max_stored_bytes"])
def test_bytes_are_shared_among_tokens(open_queue: Open, limit: str) -> None:
    queue = open_queue(**{limit: 4000})
    with pytest.raises(QueueFull, match=f"of all runs of its token.*{limit} is 4000"):
        for i in range(40):
            queue.put(upload(f"{i}", run=f"made up {i}", uploader="one", body=b"." * 100))
    assert queue.put(upload("honest", run="honest", uploader="two", body=b"." * 100)).created


def test_a_token_leases_no_more_by_naming_runs(open_queue: Open) -> None:
    queue = open_queue(max_in_flight=40)
    made_up = [upload(f"made up {i}", run=f"made up {i}", uploader="one") for i in range(40)]
    make_ready(queue, *made_up, *(upload(f"honest {i}", run="honest", uploader="two") for i in range(9)))
    with pytest.raises(TooManyInFlight, match="of all runs of its token"):
        for each in made_up:
            lease(queue, run=each.run)
    assert len(ask_many(queue, run="honest", count=9)) == 5
    assert queue.look({Wanted("made up 39"): 1, Wanted("honest"): 1}, []) == {}


def test_a_run_may_lease_as_many_as_are_free(open_queue: Open) -> None:
    queue = open_queue(max_in_flight=6)
    make_ready(queue, *(upload(f"{run} {i}", run=run) for run in ("one", "two") for i in range(6)))
    held = [lease(queue, run="one") for _ in range(3)]
    with pytest.raises(TooManyInFlight, match="max_in_flight is 6"):
        ask(queue, run="one")
    with pytest.raises(TooManyInFlight, match="run 'one'"):
        ask(queue)  # names no run: what it would get is of run one
    assert lease(queue, run="two").id == "two 0"
    with pytest.raises(TooManyInFlight):
        ask(queue, run="two")
    queue.ack([key(each) for each in held])
    assert lease(queue, run="two").id == "two 1"


def fill(queue: Queue, run: str, uploader: str = "") -> int:
    """Uploads until the run is full; how many were admitted."""
    known = sum(batch.run == run for batch in queue.list(None, None, 1000, None).batches)
    for admitted in count():
        try:
            queue.put(upload(f"{run} {known + admitted}", run=run, uploader=uploader))
        except QueueFull:
            return admitted
    raise AssertionError


def test_bytes_up_to_the_limit_fit(open_queue: Open) -> None:
    queue = open_queue(max_bytes=12)
    queue.put(upload("a"))
    assert queue.put(upload("b")).created


def test_scored_bodies_count_as_large_as_they_became(open_queue: Open) -> None:
    queue = open_queue(max_bytes=24)
    make_ready(queue, upload("a"))  # "scored raw" has 10 bytes
    with pytest.raises(QueueFull):
        queue.put(upload("b"))


def test_scoring_and_leased_batches_count_until_training_starts(open_queue: Open) -> None:
    queue = open_queue(max_batches=2)
    queue.put(upload("a"))
    [claim] = queue.claim(100)
    with pytest.raises(QueueFull):
        queue.put(upload("b"))
    queue.complete(claim.id, b"scored")
    held = lease(queue)
    with pytest.raises(QueueFull):
        queue.put(upload("b"))
    queue.extend([key(held)], LEASE_SECONDS, started=True)
    assert queue.put(upload("b")).created


def test_a_started_batch_that_is_lost_counts_again(open_queue: Open, clock: Clock) -> None:
    queue = open_queue(max_batches=2)
    make_ready(queue, upload("a"))
    lose(queue, clock, started=True)
    with pytest.raises(QueueFull):
        queue.put(upload("b"))


def test_dead_and_expired_batches_leave_room(open_queue: Open) -> None:
    queue = open_queue(max_batches=4, max_scoring_attempts=1)
    queue.put(upload("dead"))
    queue.claim(100)
    queue.fail("dead", "boom")
    queue.put(upload("expired", version=0))
    ask(queue, run="run", policy_version=9, max_lag=1)
    assert queue.put(upload("b")).created
    assert queue.put(upload("c")).created


@pytest.mark.parametrize("limits", [{"max_in_flight": 4}, {"max_in_flight_per_run": 2}])
def test_leases_that_are_not_settled_are_bounded(open_queue: Open, limits: dict[str, int]) -> None:
    queue = open_queue(**limits)
    make_ready(queue, *(upload(id) for id in "abc"))
    first, second = lease(queue, run="run", request_id="1"), lease(queue, run="run")
    queue.extend([key(first)], LEASE_SECONDS, started=True)
    [(limit, value)] = limits.items()
    with pytest.raises(TooManyInFlight, match=f"{limit} is {value}"):
        ask(queue, run="run")
    assert lease(queue, run="run", request_id="1") == first
    queue.ack([key(second)])
    assert lease(queue, run="run").id == "c"


def test_a_run_at_its_bound_leaves_leases_to_another(open_queue: Open) -> None:
    queue = open_queue(max_in_flight_per_run=1)
    make_ready(queue, upload("a", run="one"), upload("b", run="one"), upload("c", run="two"))
    lease(queue, run="one")
    assert lease(queue, run="two").id == "c"


def test_a_new_life_of_a_consumer_at_its_bound_can_go_on(open_queue: Open) -> None:
    queue = open_queue(max_in_flight=2)
    make_ready(queue, upload("a"))
    lease(queue, incarnation="one")
    assert lease(queue, incarnation="two").id == "a"


def test_an_upload_that_is_not_to_be_scored_is_ready_at_once(queue: Queue) -> None:
    admission = queue.put(replace(upload("a"), to_score=False))
    assert admission == Uploaded(id="a", state=State.READY, created=True)
    assert queue.claim(100) == []
    assert lease(queue).body == b"raw"


# --- scoring


def test_claims_come_oldest_first_up_to_the_budget(queue: Queue) -> None:
    for id in ("a", "b", "c"):
        queue.put(upload(id, tokens=10))
    assert [claim.id for claim in queue.claim(20)] == ["a", "b"]
    assert [claim.id for claim in queue.claim(20)] == ["c"]
    assert queue.claim(20) == []


def test_a_batch_over_the_budget_is_claimed_alone(queue: Queue) -> None:
    queue.put(upload("a", tokens=100))
    queue.put(upload("b"))
    assert [claim.id for claim in queue.claim(20)] == ["a"]


def test_a_claim_carries_the_upload(queue: Queue) -> None:
    queue.put(upload("a", body=b"as uploaded"))
    [claim] = queue.claim(1)
    assert (claim.body, claim.attempts) == (b"as uploaded", 0)
    assert state(queue, "a") is State.SCORING


def test_a_completed_batch_is_ready_with_its_new_body(queue: Queue) -> None:
    make_ready(queue, upload("a"))
    info = queue.get("a")
    assert info is not None
    assert (info.state, info.payload_bytes) == (State.READY, 10)
    assert queue.payload("a") == lease(queue).body == b"scored raw"


def test_a_failed_scoring_is_tried_again_and_then_dead(open_queue: Open) -> None:
    queue = open_queue(max_scoring_attempts=2)
    queue.put(upload("a"))
    queue.claim(100)
    assert queue.fail("a", "first") is State.QUEUED
    [claim] = queue.claim(100)
    assert claim.attempts == 1
    assert queue.fail("a", "second") is State.DEAD
    assert "second" in (reason(queue, "a") or "")
    assert queue.claim(100) == []
    assert queue.payload("a") == b"raw"


def test_only_what_is_claimed_can_be_completed_or_fail(queue: Queue) -> None:
    queue.put(upload("a"))
    with pytest.raises(WrongState):
        queue.complete("a", b"scored")
    with pytest.raises(WrongState):
        queue.fail("a", "boom")
    with pytest.raises(KeyError):
        queue.complete("nobody", b"scored")
    assert queue.payload("a") == b"raw"


# --- the order of leases


def test_nothing_ready_nothing_leased(queue: Queue) -> None:
    queue.put(upload("a"))
    assert ask(queue) is None


def test_a_damaged_row_hides_no_other(queue: Queue) -> None:
    make_ready(queue, upload("a"), upload("b"))
    assert isinstance(queue, Queue)
    queue._run(lambda tx: tx.execute("UPDATE batches SET state = 'zombie' WHERE id = 'a'"))
    with structlog.testing.capture_logs() as logs:
        assert [batch.id for batch in queue.list(None, None, 9, None).batches] == ["b"]
    assert [entry["id"] for entry in logs] == ["a"]
    assert queue.stats().runs == {"run": {State.READY: Depth(batches=1, bytes=len(b"scored raw"))}}
    assert lease(queue).id == "b"


def test_a_batch_whose_payload_is_missing_keeps_no_other_from_being_scored(queue: Queue) -> None:
    for id in ("a", "b"):
        queue.put(upload(id))
    assert isinstance(queue, Queue)
    queue._run(lambda tx: tx.execute("DELETE FROM payloads WHERE seq = (SELECT seq FROM batches WHERE id = 'a')"))
    assert [claim.id for claim in queue.claim(1)] == ["b"]
    assert (state(queue, "a"), reason(queue, "a")) == (State.EXPIRED, "its payload is missing in the store")


def test_fifo_is_the_order_of_admission(queue: Queue) -> None:
    for id in ("a", "b", "c"):
        queue.put(upload(id))
    for claim in reversed(queue.claim(100)):
        queue.complete(claim.id, b"scored")
    assert drain(queue) == ["a", "b", "c"]


def test_freshest_is_the_highest_version_then_the_newest(queue: Queue) -> None:
    make_ready(queue, upload("a", version=2), upload("b", version=3), upload("c", version=3), upload("d", version=1))
    assert drain(queue, order=Order.FRESHEST) == ["c", "b", "a", "d"]


def test_orders_hold_across_runs_and_epochs(queue: Queue) -> None:
    batches = [upload("a", run="y", version=1), upload("b", run="x", epoch=1, version=2), upload("c", run="x")]
    make_ready(queue, *batches)
    assert drain(queue) == ["a", "b", "c"]
    make_ready(queue, *(replace(batch, id=f"{batch.id}2") for batch in batches))
    assert drain(queue, order=Order.FRESHEST) == ["b2", "a2", "c2"]


@pytest.mark.parametrize("order", Order)
def test_returned_batches_come_first_in_the_order_they_had(queue: Queue, clock: Clock, order: Order) -> None:
    make_ready(queue, *(upload(id, version=version) for id, version in (("a", 1), ("b", 2), ("c", 3), ("d", 4))))
    first, second = lease(queue, order=order), lease(queue, order=order)
    make_ready(queue, upload("newest", version=9))
    queue.release([key(second)])
    clock.advance(LEASE_SECONDS)
    assert drain(queue, order=order)[:2] == [first.id, second.id]


def test_a_returned_batch_comes_before_older_ones_that_never_left(queue: Queue) -> None:
    make_ready(queue, upload("a"), upload("b"))
    queue.release([key(lease(queue, order=Order.FRESHEST))])
    assert drain(queue) == ["b", "a"]


def test_a_lease_keeps_to_its_run(queue: Queue) -> None:
    make_ready(queue, upload("a", run="one"), upload("b", run="two"))
    assert drain(queue, run="two") == ["b"]


def test_a_batch_is_leased_once_at_a_time(queue: Queue) -> None:
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


# --- leases: how they hold and end


def test_a_lease_says_what_it_is(queue: Queue) -> None:
    make_ready(queue, upload("a"))
    held = lease(queue, consumer="me", lease_seconds=7.0)
    assert (held.id, held.lease_seconds, held.deliveries, held.body) == ("a", 7.0, 1, b"scored raw")
    info = queue.get("a")
    assert info is not None
    assert (info.state, info.consumer) == (State.LEASED, "me")


def test_a_lease_holds_for_its_time(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("a"))
    held = lease(queue)
    clock.advance(LEASE_SECONDS - 0.1)
    assert ask(queue) is None
    clock.advance(0.1)
    again = lease(queue)
    assert again.id == held.id
    assert again.token != held.token


def test_the_consumer_says_for_how_long(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("a"))
    lease(queue, lease_seconds=3.0)
    clock.advance(2.9)
    assert state(queue, "a") is State.LEASED
    clock.advance(0.1)
    assert state(queue, "a") is State.READY


def test_a_lost_lease_shows_at_once(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("a"))
    lease(queue)
    clock.advance(LEASE_SECONDS)
    assert state(queue, "a") is State.READY
    [states] = queue.stats().runs.values()
    assert {state: depth.batches for state, depth in states.items()} == {State.READY: 1}


@pytest.mark.parametrize("act", ["ack", "extend", "release"])
def test_the_token_of_a_lost_lease_is_refused_though_nobody_leased_since(queue: Queue, clock: Clock, act: str) -> None:
    make_ready(queue, upload("a"))
    held = lease(queue)
    clock.advance(LEASE_SECONDS)
    arguments = {"extend": [LEASE_SECONDS]}.get(act, [])
    assert getattr(queue, act)([key(held)], *arguments) == [Outcome.STALE]
    assert state(queue, "a") is State.READY


def test_extending_gives_time_from_now(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("a"))
    held = lease(queue)
    clock.advance(LEASE_SECONDS - 1)
    assert queue.extend([key(held)], 3.0) == [Outcome.OK]
    clock.advance(2.9)
    assert ask(queue) is None
    clock.advance(0.1)
    assert lease(queue).id == "a"


def test_extending_again_does_not_take_back_that_training_started(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("a"))
    held = lease(queue)
    queue.extend([key(held)], LEASE_SECONDS, started=True)
    queue.extend([key(held)], LEASE_SECONDS)
    clock.advance(LEASE_SECONDS)
    assert lease(queue).deliveries == 2


def test_a_released_batch_can_be_leased_at_once(queue: Queue) -> None:
    make_ready(queue, upload("a"))
    assert queue.release([key(lease(queue))]) == [Outcome.OK]
    assert lease(queue).deliveries == 1


# --- what counts as a delivery


def test_a_loss_before_training_started_is_no_delivery(open_queue: Open, clock: Clock) -> None:
    queue = open_queue(max_deliveries=1)
    make_ready(queue, upload("a"))
    lose(queue, clock, started=False)
    assert lease(queue).deliveries == 1


def test_started_losses_count_until_the_batch_is_dead(open_queue: Open, clock: Clock) -> None:
    queue = open_queue(max_deliveries=2)
    make_ready(queue, upload("a"))
    lose(queue, clock, started=True)
    assert state(queue, "a") is State.READY
    lose(queue, clock, started=True)
    assert ask(queue) is None
    info = queue.get("a")
    assert info is not None
    assert (info.state, info.deliveries) == (State.DEAD, 2)
    assert "trainer lost" in (info.reason or "")
    assert queue.payload("a") == b"scored raw"


def test_having_started_is_forgotten_with_the_lease(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("a"))
    lose(queue, clock, started=True)
    lose(queue, clock, started=False)
    assert lease(queue).deliveries == 2


def test_a_release_with_an_error_counts_and_tells_why(open_queue: Open) -> None:
    queue = open_queue(max_deliveries=2)
    make_ready(queue, upload("a"))
    queue.release([key(lease(queue))], error="first NaN")
    assert queue.release([key(lease(queue))], error="second NaN") == [Outcome.OK]
    assert state(queue, "a") is State.DEAD
    assert "second NaN" in (reason(queue, "a") or "")


def test_a_release_without_an_error_does_not_count_even_when_started(open_queue: Open) -> None:
    queue = open_queue(max_deliveries=1)
    make_ready(queue, upload("a"))
    held = lease(queue)
    queue.extend([key(held)], LEASE_SECONDS, started=True)
    queue.release([key(held)])
    assert lease(queue).deliveries == 1


# --- outcomes


def test_an_ack_settles_and_drops_the_payload(queue: Queue) -> None:
    make_ready(queue, upload("a"))
    assert queue.ack([key(lease(queue))], checkpoint="step-7") == [Outcome.OK]
    info = queue.get("a")
    assert info is not None
    assert (info.state, info.payload_bytes, info.consumer) == (State.DONE, 0, "trainer")
    assert "step-7" in info.history[-1].detail
    assert queue.payload("a") is None
    assert ask(queue) is None


def test_a_settled_batch_is_never_lost(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("a"))
    queue.ack([key(lease(queue))])
    clock.advance(LEASE_SECONDS)
    assert state(queue, "a") is State.DONE


def test_after_an_ack_the_same_token_has_it_already(queue: Queue) -> None:
    make_ready(queue, upload("a"))
    held = lease(queue)
    queue.ack([key(held)])
    assert queue.ack([key(held)]) == [Outcome.ALREADY]
    assert queue.extend([key(held)], 1.0) == [Outcome.ALREADY]
    assert queue.release([key(held)], error="late") == [Outcome.ALREADY]
    assert state(queue, "a") is State.DONE


def test_after_a_release_the_same_token_has_released_already_but_holds_nothing(queue: Queue) -> None:
    make_ready(queue, upload("a"))
    held = lease(queue)
    queue.release([key(held)])
    assert queue.release([key(held)], error="late") == [Outcome.ALREADY]
    assert queue.ack([key(held)]) == [Outcome.STALE]
    assert queue.extend([key(held)], 1.0) == [Outcome.STALE]
    assert lease(queue).deliveries == 1


def test_a_repeated_release_does_not_touch_the_next_lease(queue: Queue) -> None:
    make_ready(queue, upload("a"))
    old = lease(queue)
    queue.release([key(old)])
    new = lease(queue)
    assert queue.release([key(old)]) == [Outcome.ALREADY]
    assert queue.ack([key(new)]) == [Outcome.OK]


def test_an_old_token_is_stale_after_another_one_settled(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("a"))
    old = lease(queue)
    clock.advance(LEASE_SECONDS)
    queue.ack([key(lease(queue))])
    assert queue.ack([key(old)]) == [Outcome.STALE]


@pytest.mark.parametrize("token", ["", "wrong", "fälschlich"])
def test_a_wrong_token_is_stale(queue: Queue, token: str) -> None:
    make_ready(queue, upload("leased"), upload("ready"))
    lease(queue)
    assert queue.ack([LeaseKey(id="leased", token=token), LeaseKey(id="ready", token=token)]) == [
        Outcome.STALE,
        Outcome.STALE,
    ]


def test_one_call_answers_each_lease_in_order(queue: Queue) -> None:
    make_ready(queue, *(upload(str(number)) for number in range(300)))
    keys = [key(lease(queue)) for _ in range(300)]
    asked = [*keys, keys[0], LeaseKey(id="0", token="wrong"), LeaseKey(id="nobody", token="x")]
    expected = [*[Outcome.OK] * 300, Outcome.ALREADY, Outcome.STALE, Outcome.UNKNOWN]
    assert queue.ack(asked) == expected


def test_no_leases_no_outcomes(queue: Queue) -> None:
    assert queue.ack([]) == []


# --- repeated requests and incarnations


def test_a_repeated_request_gets_the_same_lease(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("a"), upload("b"))
    first = lease(queue, request_id="1")
    clock.advance(LEASE_SECONDS - 1)
    assert lease(queue, request_id="1", lease_seconds=99.0) == first
    assert lease(queue, request_id="2").id == "b"
    clock.advance(1)  # the repetition gave it no new time
    assert state(queue, "a") is State.READY


def test_a_request_id_means_something_to_its_consumer_only(queue: Queue) -> None:
    make_ready(queue, upload("a"), upload("b"))
    lease(queue, consumer="one", request_id="1")
    assert lease(queue, consumer="two", request_id="1").id == "b"


@pytest.mark.parametrize("end", ["ack", "release"])
def test_a_request_whose_lease_ended_leases_anew(queue: Queue, end: str) -> None:
    make_ready(queue, upload("a"), upload("b"))
    first = lease(queue, request_id="1")
    getattr(queue, end)([key(first)])
    assert lease(queue, request_id="1").token != first.token


def test_a_new_incarnation_ends_the_old_leases_which_come_first(queue: Queue) -> None:
    make_ready(queue, *(upload(id) for id in "abcd"))
    old = [lease(queue, incarnation="one") for _ in range(2)]
    anonymous = lease(queue)
    assert lease(queue, incarnation="two", request_id="x").id == "a"
    assert drain(queue, incarnation="two") == ["b", "c", "d"]
    assert queue.ack([key(held) for held in (*old, anonymous)]) == [Outcome.STALE] * 3


def test_a_new_incarnation_ends_a_repeatable_request_too(queue: Queue) -> None:
    make_ready(queue, upload("a"))
    first = lease(queue, incarnation="one", request_id="1")
    assert lease(queue, incarnation="two", request_id="1").token != first.token


def test_a_new_incarnation_leaves_other_consumers_alone(queue: Queue) -> None:
    make_ready(queue, upload("a"), upload("b"))
    other = lease(queue, consumer="other", incarnation="one")
    lease(queue, incarnation="two")
    assert queue.ack([key(other)]) == [Outcome.OK]


def test_the_same_incarnation_keeps_its_leases(queue: Queue) -> None:
    make_ready(queue, upload("a"), upload("b"))
    held = [lease(queue, incarnation="one") for _ in range(2)]
    assert queue.ack([key(each) for each in held]) == [Outcome.OK] * 2


@pytest.mark.parametrize(("started", "deliveries"), [(False, 1), (True, 2)])
def test_ending_by_a_new_incarnation_counts_like_any_loss(queue: Queue, started: bool, deliveries: int) -> None:
    make_ready(queue, upload("a"))
    queue.extend([key(lease(queue, incarnation="one"))], LEASE_SECONDS, started=started)
    assert lease(queue, incarnation="two").deliveries == deliveries


def test_a_late_request_of_an_old_incarnation_takes_nothing(queue: Queue) -> None:
    make_ready(queue, upload("a"), upload("b"))
    lease(queue, incarnation="one")
    held = lease(queue, incarnation="two")
    with pytest.raises(Superseded):
        ask(queue, incarnation="one")
    assert queue.ack([key(held)]) == [Outcome.OK]


# --- staleness and epochs


def test_batches_older_than_the_lag_expire_as_stale(queue: Queue) -> None:
    make_ready(queue, upload("old", version=6), upload("good", version=7))
    queue.put(upload("old and queued", version=6))
    assert drain(queue, run="run", policy_version=9, max_lag=2) == ["good"]
    assert state(queue, "old") is State.EXPIRED
    assert reason(queue, "old") == "stale"
    assert state(queue, "old and queued") is State.EXPIRED
    assert queue.payload("old") is not None


@pytest.mark.parametrize(
    "request_",
    [
        {"policy_version": 9},
        {"run": "run", "policy_version": 9},
        {"run": "other", "policy_version": 9, "max_lag": 2},
    ],
)
def test_nothing_is_stale_without_run_version_and_lag(queue: Queue, request_: dict) -> None:
    make_ready(queue, upload("old", version=6))
    ask(queue, **request_)
    assert state(queue, "old") is not State.EXPIRED


def test_what_others_hold_does_not_expire_under_them(queue: Queue) -> None:
    make_ready(queue, upload("old", version=0))
    held = lease(queue, consumer="other")
    assert ask(queue, run="run", epoch=1, policy_version=9, max_lag=2) is None
    assert queue.ack([key(held)]) == [Outcome.OK]


def test_a_lost_batch_can_be_stale_when_it_comes_back(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("old", version=0))
    lose(queue, clock, started=False)
    assert ask(queue, run="run", policy_version=9, max_lag=2) is None
    assert reason(queue, "old") == "stale"


def test_a_batch_lost_in_training_is_leased_once_more_before_it_is_stale(queue: Queue, clock: Clock) -> None:
    """A checkpoint may hold its effect, and its trainer, which comes again, will ack it."""
    make_ready(queue, upload("a", version=0), upload("b", version=0))
    lose(queue, clock, started=True)
    now = {"run": "run", "policy_version": 9, "max_lag": 2}
    held = lease(queue, **now)
    assert held.id == "a"
    assert reason(queue, "b") == "stale"
    queue.release([key(held)])
    assert ask(queue, **now) is None
    assert reason(queue, "a") == "stale"


def test_older_epochs_are_good_up_to_the_fork(queue: Queue) -> None:
    make_ready(queue, upload("before", version=4), upload("at", version=5), upload("after", version=6))
    queue.put(upload("after and queued", version=6))
    assert drain(queue, run="run", epoch=1, policy_version=5) == ["before", "at"]
    for id in ("after", "after and queued"):
        assert state(queue, id) is State.EXPIRED
        assert reason(queue, id) == "abandoned"


def test_the_fork_is_where_the_epoch_was_first_seen(queue: Queue) -> None:
    ask(queue, run="run", epoch=1, policy_version=5)
    make_ready(queue, upload("after", version=6), upload("new", epoch=1, version=6))
    assert drain(queue, run="run", epoch=1, policy_version=8) == ["new"]
    assert reason(queue, "after") == "abandoned"


def test_the_earliest_fork_since_then_decides(queue: Queue) -> None:
    """0 ran to 9, 1 left it at 8, 2 left 1 at 5: what 0 sampled at 6 is of no lineage of 2."""
    ask(queue, run="run", epoch=1, policy_version=8)
    make_ready(
        queue,
        upload("0 at 5", version=5),
        upload("0 at 6", version=6),
        upload("1 at 8", epoch=1, version=8),
        upload("2 at 9", epoch=2, version=9),
    )
    assert drain(queue, run="run", epoch=2, policy_version=5) == ["0 at 5", "2 at 9"]
    assert [reason(queue, id) for id in ("0 at 6", "1 at 8")] == ["abandoned"] * 2


def test_a_later_fork_does_not_bring_back_more(queue: Queue) -> None:
    """1 left 0 at 5 and 2 left 1 at 8: what 0 sampled at 6 is of no lineage of 2."""
    ask(queue, run="run", epoch=1, policy_version=5)
    make_ready(queue, upload("0 at 6", version=6), upload("1 at 7", epoch=1, version=7))
    assert drain(queue, run="run", epoch=2, policy_version=8) == ["1 at 7"]
    assert reason(queue, "0 at 6") == "abandoned"


def test_newer_epochs_are_neither_leased_nor_expired(queue: Queue) -> None:
    make_ready(queue, upload("newer", epoch=2, version=0), upload("same", epoch=1, version=9))
    assert drain(queue, run="run", epoch=1, policy_version=9, max_lag=2) == ["same"]
    assert state(queue, "newer") is State.READY


def test_an_upload_is_at_most_one_epoch_ahead_of_its_trainer(queue: Queue) -> None:
    """An epoch that no trainer opens is never leased, and would fill its run."""
    queue.put(upload("nobody trains yet", lineage="one", epoch=2**62))
    ask(queue, run="run", lineage="one", epoch=3, policy_version=7)
    queue.put(upload("next", lineage="one", epoch=4))
    with pytest.raises(EpochAhead, match="at most 4, since the trainer of run 'run' is in 3; got 5"):
        queue.put(upload("ahead", lineage="one", epoch=5))
    assert queue.get("ahead") is None
    assert not queue.put(upload("nobody trains yet", lineage="one", epoch=2**62)).created
    assert queue.put(upload("other", run="other", lineage="one", epoch=5)).created
    ask(queue, run="run", lineage="one", epoch=4, policy_version=7)
    assert queue.put(upload("ahead", lineage="one", epoch=5)).created


def test_epochs_of_another_run_are_another_matter(queue: Queue) -> None:
    make_ready(queue, upload("other", run="other", version=9))
    ask(queue, run="run", epoch=1, policy_version=5)
    assert state(queue, "other") is State.READY


def test_an_epoch_without_a_version_abandons_nothing(queue: Queue) -> None:
    make_ready(queue, upload("a", version=9))
    assert drain(queue, run="run", epoch=1) == ["a"]


# --- runs without leases


def test_the_freshest_ready_batch_of_a_run_is_taken_once(queue: Queue) -> None:
    make_ready(queue, upload("a", body=b"a"), upload("b", body=b"b"), upload("c", run="other"))
    queue.put(upload("d"))
    assert [queue.take("run") for _ in range(3)] == [b"scored b", b"scored a", None]
    assert state(queue, "c") is State.READY


def test_nothing_to_take_is_no_flush(queue: Queue) -> None:
    queue.put(upload("a"))
    samples = queue.activity.registry.get_sample_value
    before = samples("tandem_commit_seconds_count")
    assert queue.take("run") is None
    assert samples("tandem_commit_seconds_count") == before


def test_what_is_taken_is_done(queue: Queue) -> None:
    make_ready(queue, upload("a"))
    queue.take("run")
    info = queue.get("a")
    assert info is not None
    assert (info.state, info.payload_bytes, info.history[-1].detail) == (State.DONE, 0, "delivered")
    assert queue.payload("a") is None
    assert queue.put(upload("a")) == Uploaded(id="a", state=State.DONE, created=False)
    assert queue.activity.counts()[Count.DELIVERED] == 1


def test_what_is_taken_stays_taken_in_another_life(open_queue: Open) -> None:
    queue = open_queue()
    make_ready(queue, upload("a"), upload("b", body=b"b"))
    assert queue.take("run") == b"scored b"
    queue.close()
    queue = open_queue()
    assert [queue.take("run"), queue.take("run")] == [b"scored raw", None]


def test_many_who_take_at_once_get_each_batch_once(queue: Queue) -> None:
    bodies = {f"scored {i}".encode() for i in range(40)}
    make_ready(queue, *(upload(str(i), body=str(i).encode()) for i in range(40)))
    with ThreadPoolExecutor(8) as pool:
        taken = [body for body in pool.map(lambda _: queue.take("run"), range(60)) if body is not None]
    # One who finds the last rows held by others may go away with nothing; nobody gets what another has.
    taken += iter(lambda: queue.take("run"), None)
    assert Counter(taken) == Counter(bodies)


def test_the_legacy_run_is_leased_to_nobody_who_does_not_name_it(queue: Queue) -> None:
    make_ready(queue, upload("a", run=LEGACY_RUN), upload("b"))
    assert drain(queue) == ["b"]
    assert ask(queue, order=Order.FRESHEST) is None


def test_the_oldest_make_room(open_queue: Open) -> None:
    queue = open_queue(max_batches=4)
    assert queue.put_displacing(upload("a")) == []
    make_ready(queue, upload("b"))
    assert queue.put_displacing(upload("c")) == ["a"]
    assert queue.put_displacing(upload("d")) == ["b"]
    assert [state(queue, id) for id in "abcd"] == [State.EXPIRED, State.EXPIRED, State.QUEUED, State.QUEUED]
    assert (reason(queue, "a"), queue.payload("a")) == ("displaced", None)
    assert queue.activity.counts()[Count.EXPIRED_DISPLACED] == 2


def test_as_many_as_it_takes_make_room(open_queue: Open) -> None:
    queue = open_queue(max_bytes=18)
    for id in "abc":
        queue.put(upload(id))
    assert queue.put_displacing(upload("d", body=b"u" * 5)) == ["a", "b"]


def test_others_make_no_room_and_neither_does_what_is_in_use(open_queue: Open) -> None:
    queue = open_queue(max_batches=6)
    make_ready(queue, upload("leased"))
    lease(queue)
    queue.put(upload("scored"))
    queue.claim(100)
    queue.put(upload("other", run="other"))
    with pytest.raises(QueueFull):
        queue.put_displacing(upload("new"))
    assert queue.get("new") is None
    assert [state(queue, id) for id in ("leased", "scored", "other")] == [State.LEASED, State.SCORING, State.QUEUED]


def test_what_makes_too_little_room_stays(open_queue: Open) -> None:
    queue = open_queue(max_bytes=15)
    queue.put(upload("a"))
    queue.put(upload("other", run="other"))
    with pytest.raises(QueueFull):
        queue.put_displacing(upload("b", body=b"u" * 7))
    assert queue.payload("a") == b"raw"
    assert state(queue, "a") is State.QUEUED
    assert queue.activity.counts()[Count.EXPIRED_DISPLACED] == 0


def test_displacing_at_once_keeps_the_bound(open_queue: Open) -> None:
    queue = open_queue(max_batches=6)
    with ThreadPoolExecutor(8) as pool:
        displaced = list(pool.map(lambda i: queue.put_displacing(upload(str(i))), range(30)))
    gone = [id for ids in displaced for id in ids]
    assert len(gone) == len(set(gone)) == 27
    assert {id for id in map(str, range(30)) if state(queue, id) is State.QUEUED} == set(map(str, range(30))) - set(
        gone
    )


# --- what an operator does


def test_a_dead_batch_is_queued_again_from_the_start(open_queue: Open) -> None:
    queue = open_queue(max_scoring_attempts=1)
    queue.put(upload("a"))
    queue.claim(100)
    queue.fail("a", "boom")
    assert queue.requeue("a") is State.QUEUED
    assert reason(queue, "a") is None
    [claim] = queue.claim(100)
    assert claim.attempts == 0


def test_a_scored_batch_is_not_scored_again(open_queue: Open) -> None:
    queue = open_queue(max_deliveries=1)
    make_ready(queue, upload("a"))
    queue.release([key(lease(queue))], error="boom")
    assert queue.requeue("a") is State.READY
    assert lease(queue).deliveries == 1


def test_a_requeued_batch_is_no_longer_settled(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("a"))
    ask(queue, run="run", policy_version=9, max_lag=0)
    queue.requeue("a")
    clock.advance(RETENTION + 61)
    queue.tidy()
    assert state(queue, "a") is State.READY


def test_requeueing_respects_the_limits(open_queue: Open) -> None:
    queue = open_queue(max_batches=2)
    make_ready(queue, upload("a"))
    ask(queue, run="run", policy_version=9, max_lag=0)
    queue.put(upload("b"))
    with pytest.raises(QueueFull):
        queue.requeue("a")
    assert state(queue, "a") is State.EXPIRED


def test_only_dead_and_expired_batches_are_requeued(queue: Queue) -> None:
    queue.put(upload("a"))
    with pytest.raises(WrongState):
        queue.requeue("a")
    with pytest.raises(KeyError):
        queue.requeue("nobody")


def test_a_dropped_batch_is_gone_but_known(queue: Queue) -> None:
    make_ready(queue, upload("a"))
    held = lease(queue)
    queue.drop("a")
    assert reason(queue, "a") == "dropped"
    assert queue.payload("a") is None
    assert queue.ack([key(held)]) == [Outcome.STALE]
    assert queue.put(upload("a")) == Uploaded(id="a", state=State.EXPIRED, created=False)
    with pytest.raises(WrongState):
        queue.requeue("a")


def test_dropping_leaves_room(open_queue: Open) -> None:
    queue = open_queue(max_batches=2)
    queue.put(upload("a"))
    queue.drop("a")
    assert queue.put(upload("b")).created


def test_what_is_done_stays_done_and_what_is_being_scored_stays(queue: Queue) -> None:
    make_ready(queue, upload("done"))
    queue.ack([key(lease(queue))])
    queue.drop("done")
    assert state(queue, "done") is State.DONE
    queue.put(upload("scoring"))
    queue.claim(100)
    with pytest.raises(WrongState):
        queue.drop("scoring")
    with pytest.raises(KeyError):
        queue.drop("nobody")


# --- looking


def test_the_history_tells_the_way_of_a_batch(queue: Queue, clock: Clock) -> None:
    queue.put(upload("a", version=3))
    clock.advance(1)
    make_ready(queue)
    queue.release([key(lease(queue))], error="boom")
    queue.ack([key(lease(queue))])
    info = queue.get("a")
    assert info is not None
    ready, leased = State.READY, State.LEASED
    assert [event.state for event in info.history] == [
        State.QUEUED,
        State.SCORING,
        ready,
        leased,
        ready,
        leased,
        State.DONE,
    ]
    assert "boom" in info.history[4].detail
    assert info.history[1].at - info.history[0].at == 1
    assert info.admitted_at == info.history[0].at
    assert (info.policy_version, info.completions, info.prompt_tokens, info.completion_tokens) == (3, 2, 4, 6)


def test_a_long_history_keeps_its_beginning_and_its_end(queue: Queue) -> None:
    make_ready(queue, upload("a"))
    for number in range(100):
        queue.release([key(lease(queue, f"consumer-{number}"))])
    info = queue.get("a")
    assert info is not None
    details = [event.detail for event in info.history]
    assert len(details) == 2 * KEPT_EVENTS
    assert [event.state for event in info.history[:4]] == [State.QUEUED, State.SCORING, State.READY, State.LEASED]
    assert details[3] == "to consumer-0"
    assert details[-2:] == ["to consumer-99", "given back by consumer-99"]


def test_an_unknown_batch_is_none(queue: Queue) -> None:
    assert queue.get("nobody") is None
    assert queue.payload("nobody") is None


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (ListOrder.OLDEST, [["0", "1", "2"], ["3", "4", "5"], ["6"]]),
        (ListOrder.NEWEST, [["6", "5", "4"], ["3", "2", "1"], ["0"]]),
    ],
)
def test_the_list_goes_page_by_page_in_either_order(queue: Queue, order: ListOrder, expected: list[list[str]]) -> None:
    for number in range(7):
        queue.put(upload(str(number)))
    pages, cursor = [], None
    while True:
        page = queue.list(None, None, 3, cursor, order)
        pages.append([info.id for info in page.batches])
        if (cursor := page.next_cursor) is None:
            break
    assert pages == expected


def test_the_newest_first_begins_at_the_newest_and_misses_later_ones(queue: Queue) -> None:
    for id in "ab":
        queue.put(upload(id))
    page = queue.list(None, None, 1, None, ListOrder.NEWEST)
    queue.put(upload("c"))
    rest = queue.list(None, None, 9, page.next_cursor, ListOrder.NEWEST)
    assert ([info.id for info in page.batches], [info.id for info in rest.batches]) == (["b"], ["a"])


def test_a_last_page_that_is_full_has_no_next(queue: Queue) -> None:
    queue.put(upload("a"))
    assert queue.list(None, None, 1, None).next_cursor is None


def test_the_list_keeps_to_a_state_and_a_run(queue: Queue) -> None:
    make_ready(queue, upload("a", run="one"), upload("b", run="two"))
    queue.put(upload("c", run="one"))
    assert [info.id for info in queue.list(State.READY, None, 9, None).batches] == ["a", "b"]
    assert [info.id for info in queue.list(None, "one", 9, None).batches] == ["a", "c"]
    assert [info.id for info in queue.list(State.READY, "one", 9, None).batches] == ["a"]


@pytest.mark.parametrize("cursor", ["", "nonsense", "-1", "f" * 40, "1 OR 1"])
def test_a_cursor_from_elsewhere_is_refused(queue: Queue, cursor: str) -> None:
    with pytest.raises(ValueError, match="cursor"):
        queue.list(None, None, 3, cursor)


def test_stats_count_batches_and_bytes_by_run_and_state(queue: Queue) -> None:
    make_ready(queue, upload("a", run="one"), upload("b", run="one", epoch=1), upload("c", run="two"))
    queue.ack([key(lease(queue, run="two"))])
    queue.extend([key(lease(queue, run="one"))], LEASE_SECONDS, started=True)
    queue.put(upload("d", run="one"))
    scored, raw, gone = Depth(batches=1, bytes=10), Depth(batches=1, bytes=3), Depth(batches=1, bytes=0)
    assert queue.stats().runs == {
        "one": {State.LEASED: scored, State.READY: scored, State.QUEUED: raw},
        "two": {State.DONE: gone},
    }


def test_the_oldest_age_is_that_of_the_oldest_waiting_batch(queue: Queue, clock: Clock) -> None:
    assert queue.stats().oldest_age is None
    make_ready(queue, upload("a"))
    clock.advance(4)
    queue.put(upload("b"))
    clock.advance(2)
    assert queue.stats().oldest_age == 6
    lease(queue)
    assert queue.stats().oldest_age == 2


# --- forgetting, checking, closing


@pytest.mark.parametrize("end", [State.DONE, State.EXPIRED, State.DEAD])
def test_a_settled_id_is_known_for_the_retention_time(open_queue: Open, clock: Clock, end: State) -> None:
    queue = open_queue(max_deliveries=1)
    make_ready(queue, upload("a"), upload("waits", run="other"))
    held = lease(queue, run="run")
    if end is State.DONE:
        queue.ack([key(held)])
    elif end is State.DEAD:
        queue.release([key(held)], error="boom")
    else:
        queue.drop("a")
    clock.advance(RETENTION)
    assert queue.put(upload("a")) == Uploaded(id="a", state=end, created=False)
    queue.tidy()
    assert queue.get("a") is not None
    clock.advance(1)
    queue.tidy()
    assert queue.get("a") is None
    assert queue.put(upload("a")).created
    assert state(queue, "waits") is State.READY


def test_tidying_takes_small_steps(queue: Queue, clock: Clock) -> None:
    """A backlog of a month must not hold up a client."""
    for number in range(SLICE + 50):
        queue.put(upload(str(number)))
    while any(queue.list(State.QUEUED, None, 1, None).batches):
        for batch in queue.list(State.QUEUED, None, 1000, None).batches:
            queue.drop(batch.id)
    clock.advance(RETENTION + 1)
    assert queue.tidy()
    assert len(queue.list(None, None, 1000, None).batches) == 50
    assert not queue.tidy()
    assert queue.stats().runs == {}


def test_a_batch_that_waits_untouched_for_too_long_expires(queue: Queue, clock: Clock) -> None:
    make_ready(queue, *(upload(id) for id in ("released", "leased", "ready", "requeued")))
    queue.put(upload("queued"))
    ask(queue, run="other", policy_version=9)
    queue.drop("ready")  # dropped, so that the names below are of what waits
    queue.put(upload("waits"))
    clock.advance(WAITING_SECONDS - 1)
    queue.release([key(lease(queue))])
    held = lease(queue, lease_seconds=86_400.0), lease(queue, lease_seconds=86_400.0)
    queue.tidy()
    assert state(queue, "queued") is State.QUEUED
    queue.release([key(held[0])])
    clock.advance(2)
    queue.tidy()
    expected = {"released": State.READY, "leased": State.LEASED, "requeued": State.EXPIRED, "queued": State.EXPIRED}
    assert {id: state(queue, id) for id in expected} == expected
    assert reason(queue, "queued") == reason(queue, "requeued") == "unused"
    assert queue.payload("queued") is None
    assert queue.activity.counts()[Count.EXPIRED_UNUSED] == 3


def test_a_requeued_batch_waits_anew(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("a"))
    ask(queue, run="run", policy_version=9, max_lag=0)
    clock.advance(RETENTION - 1)
    queue.requeue("a")
    clock.advance(WAITING_SECONDS - 1)
    queue.tidy()
    assert state(queue, "a") is State.READY


def test_a_consumer_that_still_asks_is_not_forgotten(queue: Queue, clock: Clock) -> None:
    ask(queue, incarnation="old")
    ask(queue, incarnation="new")
    for _ in range(4):
        clock.advance(RETENTION / 2)
        ask(queue, incarnation="new")
        queue.tidy()
    make_ready(queue, upload("a"))
    held = lease(queue, incarnation="new", lease_seconds=10 * RETENTION)
    clock.advance(RETENTION + 1)
    queue.tidy()
    ask(queue, incarnation="newer")
    assert queue.ack([key(held)]) == [Outcome.STALE]


def test_a_run_that_is_over_is_forgotten(queue: Queue, clock: Clock) -> None:
    """Its batches first, then whose it was and its epochs."""
    make_ready(queue, upload("a", lineage="one", epoch=1, version=5))
    held = lease(queue, run="run", lineage="one", epoch=1, policy_version=5)
    queue.ack([key(held)])
    queue.finish("run", "one")
    clock.advance(RETENTION)
    queue.tidy()
    assert queue.put(upload("late", lineage="one", epoch=1)).state is State.EXPIRED, "it has finished"
    clock.advance(max(RETENTION, SILENCE_SECONDS) + 1)
    queue.tidy()
    queue.tidy()
    assert queue.put(upload("new", lineage="one", epoch=1)).state is State.QUEUED
    make_ready(queue)
    assert lease(queue, run="run", lineage="one", epoch=2, policy_version=9).id == "new"


def test_a_run_with_batches_or_with_a_trainer_is_not_forgotten(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("kept", run="silent", lineage="one"))
    lease(queue, run="silent", lineage="one", lease_seconds=86_400.0)
    queue.finish("silent", "one")
    clock.advance(SILENCE_SECONDS + 1)
    ask(queue, run="alive", lineage="one")
    queue.finish("alive", "one")
    queue.tidy()
    for run in ("silent", "alive"):
        assert queue.put(upload(f"late {run}", run=run, lineage="one")).state is State.EXPIRED


def test_a_writable_store_passes_the_check(queue: Queue) -> None:
    queue.check()


def test_a_closed_queue_says_so(queue: Queue) -> None:
    queue.close()
    queue.close()
    with pytest.raises(StorageBroken, match="closed"):
        queue.put(upload("a"))
