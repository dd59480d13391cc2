"""Admission: each id once, and as much of every limit as a run and a token may use."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count

import pytest

from ref_server.metrics import Count
from ref_server.queue.errors import ContentConflict, NoRoom, QueueFull, TooManyInFlight
from ref_server.queue.limits import RunShare
from ref_server.queue.queue import Queue
from ref_server.queue.records import Wanted
from shared.api import State, Uploaded
from tests.ref_server.queue.backends import Backend, Clock, Open, make_limits
from tests.ref_server.queue.batches import (
    LEASE_SECONDS,
    key,
    lease,
    lease_many,
    make_ready,
    reason,
    state,
    upload,
)


def fill(queue: Queue, run: str, uploader: str = "") -> int:
    """Uploads until the run is full. Returns how many were admitted."""
    known = sum(batch.run == run for batch in queue.list(None, None, 1000, None).batches)
    for admitted in count():
        try:
            queue.put(upload(f"{run} {known + admitted}", run=run, uploader=uploader))
        except QueueFull:
            return admitted
    raise AssertionError("unreachable")


def test_an_id_is_admitted_once(queue: Queue) -> None:
    assert queue.put(upload("a")) == Uploaded(id="a", state=State.QUEUED, created=True)
    make_ready(queue)
    assert queue.put(upload("a")) == Uploaded(id="a", state=State.READY, created=False)
    with pytest.raises(ContentConflict):
        queue.put(upload("a", body=b"other"))
    assert queue.payload("a") == (b"raw", b"scores.")


@pytest.mark.parametrize(
    "limits", [{"max_batches": 2}, {"max_bytes": 11}, {"max_batches_per_run": 1}, {"max_bytes_per_run": 5}]
)
def test_a_full_queue_names_the_limit(open_queue: Open, limits: dict[str, int]) -> None:
    queue = open_queue(**limits)
    queue.put(upload("a"))
    [(limit, value)] = limits.items()
    with pytest.raises(QueueFull, match=f"{limit} is {value}"):
        queue.put(upload("b"))
    assert queue.get("b") is None
    assert not queue.put(upload("a")).created, "a known batch needs no room"
    if limit.endswith("_per_run"):
        assert queue.put(upload("b", run="other")).created


def test_a_run_may_use_as_much_as_is_free(open_queue: Open) -> None:
    """A single run gets half, two a third each; a third run finds room at once."""
    queue = open_queue(max_batches=12)
    assert fill(queue, "one") == 6
    assert fill(queue, "two") == 3
    for id in ("one 0", "one 1"):
        queue.drop(id)
    assert fill(queue, "two") == 1, "now both have four, and four are free"
    assert fill(queue, "one") == 0
    assert fill(queue, "three") == 2


def test_a_token_gets_no_more_by_naming_many_runs(backend: Backend, clock: Clock) -> None:
    limits = make_limits(max_batches=400)
    with closing(backend.open(clock, limits)) as queue, pytest.raises(NoRoom, match="299 of all runs of its token"):
        for i in range(400):
            queue.put(upload(f"{i}", run=f"made up {i}", uploader="one"))
    with closing(backend.open(clock, limits)) as queue:
        queue.drop("0")
        assert fill(queue, "again", uploader="one") == 1
        assert fill(queue, "honest", uploader="two") == 50
        assert fill(queue, "third", uploader="three") == 25


def test_no_run_of_a_token_starves() -> None:
    """Each run uploads until it is refused, the first ones first; trainers take one batch of each."""

    def share(run: int) -> RunShare:
        return RunShare(f"{run}", held[run], sum(held), sum(held), "batches", "wait")

    held, most = [0] * 5, 160
    for _ in range(200):
        held = [max(0, batches - 1) for batches in held]
        for run in range(5):
            assert share(run).room(most, most // 2) > 0 or share(run).refusal(1, most, "max", most // 2)
            while not share(run).refusal(1, most, "max", most // 2):
                held[run] += 1
            assert share(run).room(most, most // 2) == 0
    assert min(held) > most // 20
    assert sum(held) <= most * 3 // 4


# --- leases in flight


@pytest.mark.parametrize("limits", [{"max_in_flight": 4}, {"max_in_flight_per_run": 2}])
def test_leases_that_are_not_settled_are_bounded(open_queue: Open, limits: dict[str, int]) -> None:
    queue = open_queue(**limits)
    make_ready(queue, *(upload(id) for id in "abc"))
    first, second = lease(queue, run="run", request_id="1"), lease(queue, run="run")
    queue.extend([key(first)], LEASE_SECONDS, started=True)
    [(limit, value)] = limits.items()
    with pytest.raises(TooManyInFlight, match=f"{limit} is {value}"):
        lease(queue, run="run")
    assert lease(queue, run="run", request_id="1") == first
    queue.ack([key(second)])
    assert lease(queue, run="run").id == "c"


def test_a_token_leases_no_more_by_naming_many_runs(open_queue: Open) -> None:
    queue = open_queue(max_in_flight=40)
    made_up = [upload(f"made up {i}", run=f"made up {i}", uploader="one") for i in range(40)]
    make_ready(queue, *made_up, *(upload(f"honest {i}", run="honest", uploader="two") for i in range(9)))
    with pytest.raises(TooManyInFlight, match="of all runs of its token"):
        for each in made_up:
            lease(queue, run=each.run)
    assert len(lease_many(queue, run="honest", count=9)) == 5
    assert queue.count_leasable({Wanted("made up 39"): 1, Wanted("honest"): 1}, []) == {}


# --- runs without leases, as those of the Simple-GRPO protocol


def test_the_freshest_ready_batch_is_taken_once(open_queue: Open) -> None:
    queue = open_queue()
    make_ready(queue, upload("a", body=b"a"), upload("b", body=b"b"), upload("c", body=b"c"), upload("d", run="other"))
    queue.put(upload("not scored"))
    assert queue.take("run") == (b"c", b"scores.")
    assert (state(queue, "c"), queue.payload("c")) == (State.DONE, None)
    assert queue.put(upload("c", body=b"c")) == Uploaded(id="c", state=State.DONE, created=False)
    assert queue.activity.counts()[Count.DELIVERED] == 1
    queue.close()
    queue = open_queue()
    assert [queue.take("run") for _ in range(2)] == [(b"b", b"scores."), (b"a", b"scores.")]
    commits = _commits(queue)
    assert queue.take("run") is None
    assert commits == _commits(queue), "an empty answer flushes nothing to the disk"


def _commits(queue: Queue) -> float | None:
    return queue.activity.registry.get_sample_value("tandem_commit_seconds_count")


def test_the_oldest_are_displaced(open_queue: Open) -> None:
    queue = open_queue(max_bytes=26)
    assert queue.put_displacing(upload("a")) == []
    make_ready(queue, upload("b"))
    assert queue.put_displacing(upload("c", body=b"u" * 5)) == ["a", "b"]
    assert (state(queue, "a"), reason(queue, "a"), queue.payload("a")) == (State.EXPIRED, "displaced", None)
    assert queue.activity.counts()[Count.EXPIRED_DISPLACED] == 2


def test_concurrent_consumers_take_each_batch_once(queue: Queue) -> None:
    make_ready(queue, *(upload(str(i), body=str(i).encode()) for i in range(40)))
    with ThreadPoolExecutor(8) as pool:
        taken = [body for body in pool.map(lambda _: queue.take("run"), range(60)) if body is not None]
    # A consumer that finds the last rows locked by others may get nothing.
    taken += iter(lambda: queue.take("run"), None)
    assert sorted(taken) == sorted((str(i).encode(), b"scores.") for i in range(40))
