"""What an operator does and sees: requeue, drop, purge, lists, histories, statistics, counts."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from ref_server.metrics import Count
from ref_server.queue.errors import QueueFull, StorageBroken, Superseded
from ref_server.queue.housekeeping import LOOKED_AT, SLICE
from ref_server.queue.payloads import BYTES_AT_ONCE
from ref_server.queue.queue import Queue
from ref_server.queue.sqlite.store import SqliteQueue
from ref_server.queue.transaction import KEPT_EVENTS
from shared.api import Depth, ListOrder, PurgeBody, Purged, State
from tests.ref_server.queue.backends import Clock, Open, make_limits
from tests.ref_server.queue.batches import (
    LEASE_SECONDS,
    details,
    key,
    lease,
    lease_many,
    make_ready,
    ready_upload,
    upload,
)

LIMITS = {"max_batches": 100_000, "max_bytes": 2**30}


# --- purge


def purges(queue: Queue, state: str = "ready", **chosen: object) -> list[Purged]:
    """All answers, until nothing is left."""
    answers: list[Purged] = []
    while not answers or answers[-1].next_cursor is not None:
        cursor = answers[-1].next_cursor if answers else None
        answers.append(queue.purge(PurgeBody.model_validate({"state": state, "cursor": cursor, **chosen})))
    return answers


def purge(queue: Queue, state: str = "ready", **chosen: object) -> list[str]:
    return [id for answer in purges(queue, state, **chosen) for id in answer.dropped]


def put_many(queue: Queue, number: int, run: str = "run", size: int = 10) -> list[str]:
    return [queue.put(ready_upload(f"{run} {each:06d}", size, run)).id for each in range(number)]


def test_a_purge_takes_slices(queue: Queue) -> None:
    ids = put_many(queue, SLICE + 50)
    first, second = purges(queue)
    assert (first.dropped, first.bytes) == (ids[:SLICE], 10 * SLICE)
    assert (second.dropped, second.bytes, second.next_cursor) == (ids[SLICE:], 500, None)
    assert queue.stats().runs == {"run": {State.EXPIRED: Depth(batches=len(ids), bytes=0)}}
    assert purge(queue) == purge(queue, "expired") == [], "a payload is dropped once"
    large = put_many(queue, 3, "large", size=BYTES_AT_ONCE // 5 * 2)
    assert [answer.dropped for answer in purges(queue)] == [large[:2], large[2:]], "bytes are bounded, too"


def test_a_purge_reads_a_bounded_number_of_batches(queue: Queue) -> None:
    put_many(queue, LOOKED_AT, "other")
    chosen = put_many(queue, 1)
    assert [answer.dropped for answer in purges(queue, run="run")] == [[], chosen]
    assert queue.stats().runs["other"][State.READY].batches == LOOKED_AT


def test_concurrent_purges_drop_each_batch_once(queue: Queue) -> None:
    ids = put_many(queue, 2 * SLICE + 50)
    with ThreadPoolExecutor(4) as threads:
        dropped = Counter(id for part in threads.map(lambda _: purge(queue), range(4)) for id in part)
    assert dropped == Counter(ids)


# --- lists, histories, statistics


def test_a_history_has_every_step_of_a_batch(queue: Queue, clock: Clock) -> None:
    queue.put(upload("a", version=3))
    clock.advance(1)
    make_ready(queue)
    queue.release([key(lease(queue))], error="boom")
    queue.ack([key(lease(queue))])
    batch = details(queue, "a")
    steps = [event.state.value for event in batch.history]
    assert steps == ["queued", "scoring", "ready", "leased", "ready", "leased", "done"]
    assert "boom" in batch.history[4].detail
    assert batch.history[1].at - batch.history[0].at == 1
    assert batch.admitted_at == batch.history[0].at
    assert (batch.policy_version, batch.completions, batch.prompt_tokens, batch.completion_tokens) == (3, 2, 4, 6)


def test_a_long_history_keeps_its_beginning_and_its_end(queue: Queue) -> None:
    make_ready(queue, upload("a"))
    for number in range(100):
        queue.release([key(lease(queue, f"consumer-{number}"))])
    events = [event.detail for event in details(queue, "a").history]
    assert len(events) == 2 * KEPT_EVENTS
    assert events[3] == "to consumer-0"
    assert events[-2:] == ["to consumer-99", "given back by consumer-99"]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (ListOrder.OLDEST, [["0", "1", "2"], ["3", "4", "5"], ["6"]]),
        (ListOrder.NEWEST, [["6", "5", "4"], ["3", "2", "1"], ["0"]]),
    ],
)
def test_a_list_comes_page_by_page_in_either_order(queue: Queue, order: ListOrder, expected: list[list[str]]) -> None:
    for number in range(7):
        queue.put(upload(str(number)))
    pages, cursor = [], None
    while True:
        page = queue.list(None, None, 3, cursor, order)
        pages.append([batch.id for batch in page.batches])
        if order is ListOrder.NEWEST:
            queue.put(upload(f"later {cursor}"))  # is on no later page
        if (cursor := page.next_cursor) is None:
            break
    assert pages == expected
    assert queue.list(State.QUEUED, None, 99, None, order).next_cursor is None


def test_a_list_keeps_to_a_state_and_a_run(queue: Queue) -> None:
    make_ready(queue, upload("a", run="one"), upload("b", run="two"))
    queue.put(upload("c", run="one"))
    assert [info.id for info in queue.list(State.READY, None, 9, None).batches] == ["a", "b"]
    assert [info.id for info in queue.list(None, "one", 9, None).batches] == ["a", "c"]
    assert [info.id for info in queue.list(State.READY, "one", 1, None).batches] == ["a"]


@pytest.mark.parametrize("cursor", ["", "nonsense", "-1", "f" * 40, "1 OR 1"])
def test_a_malformed_cursor_is_refused(queue: Queue, cursor: str) -> None:
    with pytest.raises(ValueError, match="cursor"):
        queue.list(None, None, 3, cursor)


def test_stats_count_batches_and_bytes_by_run_and_state(queue: Queue) -> None:
    make_ready(queue, upload("a", run="one"), upload("b", run="one", epoch=1), upload("c", run="two"))
    queue.ack([key(lease(queue, run="two"))])
    queue.extend([key(lease(queue, run="one"))], LEASE_SECONDS, started=True)
    queue.put(upload("d", run="one"))
    scored, raw, gone = Depth(batches=1, bytes=10), Depth(batches=1, bytes=3), Depth(batches=1, bytes=0)
    stats = queue.stats()
    assert stats.runs == {
        "one": {State.LEASED: scored, State.READY: scored, State.QUEUED: raw},
        "two": {State.DONE: gone},
    }
    assert (stats.waiting_batches, stats.waiting_bytes) == (2, 13), "as the limits count: without started ones"


def test_a_closed_queue_says_so(queue: Queue) -> None:
    queue.check()
    queue.close()
    queue.close()
    with pytest.raises(StorageBroken, match="closed"):
        queue.put(upload("a"))


# --- counts since the start


def counted(queue: Queue) -> dict[Count, int]:
    """Without zeros."""
    return {count: times for count, times in queue.activity.counts().items() if times}


def test_a_batch_that_goes_well_is_counted_once(queue: Queue, clock: Clock) -> None:
    queue.put(upload("a"))
    queue.put(upload("a"))
    clock.advance(3.0)
    make_ready(queue)
    held = lease(queue, request_id="once")
    assert lease(queue, request_id="once") == held
    for _ in range(2):
        queue.ack([key(held)])
    assert counted(queue) == dict.fromkeys((Count.ADMITTED, Count.DUPLICATE, Count.LEASED, Count.ACKED), 1)
    samples = queue.activity.registry.get_sample_value
    assert samples("tandem_admission_to_ready_seconds_sum") == pytest.approx(3.0)
    before = samples("tandem_commit_seconds_count")
    queue.check()
    queue.stats()
    assert samples("tandem_commit_seconds_count") == (before or 0) + 1, "durable commits are timed"


def test_returned_and_failed_batches_are_counted(open_queue: Open, clock: Clock) -> None:
    queue = open_queue(max_deliveries=1, max_scoring_attempts=1)
    make_ready(queue, upload("a"))
    queue.release([key(lease(queue))])
    lease(queue, incarnation="first")
    clock.advance(LEASE_SECONDS)
    lease(queue, incarnation="first")
    queue.release([key(lease(queue, incarnation="second"))], "it breaks")
    queue.put(upload("b"))
    queue.claim(100)
    queue.fail("b", "no")
    queue.requeue("b")
    queue.drop("b")
    queue.drop("b")
    make_ready(queue, upload("stale"), upload("abandoned", version=8))
    lease_many(queue, run="run", epoch=1, policy_version=5, max_lag=1)
    once = (
        Count.RELEASED, Count.LEASE_EXPIRED, Count.LEASE_SUPERSEDED, Count.DEAD_TRAINING, Count.DEAD_SCORING,
        Count.REQUEUED, Count.EXPIRED_DROPPED, Count.EXPIRED_STALE, Count.EXPIRED_ABANDONED,
    )  # fmt: skip
    happened = counted(queue)
    assert {count: happened[count] for count in once} == dict.fromkeys(once, 1) | {Count.RELEASED: 2}
    assert (happened[Count.LEASED], happened[Count.REDELIVERED]) == (4, 3)


def test_an_operation_that_is_rolled_back_counts_nothing(open_queue: Open, clock: Clock) -> None:
    """The operation that finds an expired lease takes it back, unless that operation itself fails."""
    queue = open_queue(max_batches=6)
    for incarnation in ("first", "second"):
        lease_many(queue, incarnation=incarnation)
    make_ready(queue, *map(upload, "abc"))
    lease(queue, "other")
    before = counted(queue)
    clock.advance(LEASE_SECONDS)
    with pytest.raises(QueueFull):
        queue.put(upload("d"))
    with pytest.raises(Superseded):
        lease(queue, incarnation="first")
    assert counted(queue) == before
    queue.stats()
    assert counted(queue) == before | {Count.LEASE_EXPIRED: 1}


def test_a_batch_that_ended_the_last_server_is_counted_by_the_next(tmp_path: Path) -> None:
    for expected in ({Count.ADMITTED: 1}, {Count.DEAD_INTERRUPTED: 1, Count.DUPLICATE: 1}):
        with closing(SqliteQueue(tmp_path / "queue.sqlite", limits=make_limits(max_deliveries=1))) as queue:
            queue.put(upload("a"))
            queue.claim(100)
            assert counted(queue) == expected
