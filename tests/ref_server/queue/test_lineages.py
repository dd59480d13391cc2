"""A run is more than its name: each lineage has its own batches, and a run that is at work is not taken."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ref_server.metrics.activity import Count
from ref_server.queue.errors import QueueFull, RunTaken
from ref_server.queue.queue import Queue
from ref_server.queue.records import Wanted
from ref_server.queue.sqlite.store import SqliteQueue
from shared.api import LEGACY_RUN, LeaseBody, State
from tests.ref_server.queue.backends import Backend, Clock, make_limits
from tests.ref_server.queue.test_queue import ask, drain, key, lease, make_ready, reason, state, upload

SILENCE = 10.0


@pytest.fixture
def queue(backend: Backend, clock: Clock) -> Iterator[Queue]:
    with closing(backend.open(clock, make_limits(max_batches_per_run=3))) as queue:
        yield queue


def ask_as(queue: Queue, lineage: str | None, **request):
    return ask(queue, run="run", lineage=lineage, **request)


def refusal(queue: Queue, lineage: str | None, **request) -> RunTaken:
    with pytest.raises(RunTaken) as refused:
        ask_as(queue, lineage, **request)
    return refused.value


def outcomes(queue: Queue) -> dict[str, tuple[State, str | None]]:
    return {batch.id: (batch.state, batch.reason) for batch in queue.list(None, None, 100, None).batches}


def test_a_lineage_that_waits_is_present(queue: Queue, clock: Clock) -> None:
    ask_as(queue, "one")
    for _ in range(4):
        clock.advance(8)
        queue.look({Wanted("run", "one"): 1}, [("run", "one"), ("run", "other"), ("unknown", "one")])
    assert refusal(queue, "other").retry_after == pytest.approx(10)
    clock.advance(8)
    queue.look({Wanted("run", "one"): 1}, [])
    clock.advance(8)
    assert ask_as(queue, "other") is None, "a look alone is no sign of life"


# --- whose batches


@pytest.mark.parametrize("left", ["old", ""])
def test_a_new_lineage_gets_none_of_what_another_left(queue: Queue, clock: Clock, left: str) -> None:
    make_ready(queue, upload("a", lineage=left, epoch=3, version=22))
    queue.put(upload("b", lineage=left))
    assert ask_as(queue, "new", epoch=0, policy_version=0) is None
    assert outcomes(queue) == {"a": (State.EXPIRED, "abandoned"), "b": (State.EXPIRED, "abandoned")}
    make_ready(queue, upload("c", lineage="new"))
    assert drain(queue, run="run", lineage="new") == ["c"]
    assert queue.activity.counts()[Count.EXPIRED_ABANDONED] == 2


def test_what_a_consumer_s_new_life_gives_back_of_another_lineage_is_abandoned(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("a"))
    ask_as(queue, "new")  # which is gone when its batch comes back
    clock.advance(11)
    make_ready(queue, upload("b"))
    lease(queue, incarnation="1")
    ask_as(queue, "new", incarnation="2")
    assert outcomes(queue) == {"a": (State.EXPIRED, "abandoned"), "b": (State.EXPIRED, "abandoned")}


def test_clients_without_a_lineage_share_one(queue: Queue) -> None:
    make_ready(queue, upload("a"), upload("b", lineage="new"))
    assert drain(queue, run="run") == ["a"]
    assert reason(queue, "b") == "abandoned"


def test_a_consumer_of_any_run_takes_any_lineage(queue: Queue) -> None:
    make_ready(queue, upload("a", lineage="one"), upload("b", lineage="two"), upload("c", run="other"))
    assert drain(queue) == ["a", "b", "c"]


def test_what_another_lineage_has_leased_or_scored_expires_when_it_is_back(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("leased", lineage="old"))
    lease(queue, run="run", lineage="old", lease_seconds=30.0)
    queue.put(upload("scored", lineage="old"))
    queue.claim(1000)
    clock.advance(20)
    assert ask_as(queue, "new", consumer="another") is None
    queue.complete("scored", b"done")
    clock.advance(SILENCE)
    assert ask_as(queue, "new", consumer="another") is None
    assert set(outcomes(queue).values()) == {(State.EXPIRED, "abandoned")}


def test_a_new_life_of_the_same_lineage_takes_over_as_ever(queue: Queue) -> None:
    make_ready(queue, upload("a", lineage="one"))
    held = lease(queue, run="run", lineage="one", incarnation="1")
    assert lease(queue, run="run", lineage="one", incarnation="2").id == held.id


def test_epochs_are_those_of_a_lineage(queue: Queue, clock: Clock) -> None:
    """A run that was resumed has newer epochs than one that is begun again under its name."""
    ask_as(queue, "old", epoch=5, policy_version=2)
    clock.advance(SILENCE)
    make_ready(queue, upload("a", lineage="new", epoch=0, version=7))
    assert drain(queue, run="run", lineage="new", epoch=0, policy_version=7) == ["a"]
    make_ready(queue, upload("b", lineage="new", epoch=0, version=7))
    ask_as(queue, "new", epoch=6, policy_version=7)
    assert state(queue, "b") is State.LEASED, "the other lineage's fork at version 2 does not count"


# --- who holds a run


def test_a_run_that_is_at_work_is_not_taken(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("a", lineage="one"), upload("b", lineage="one"))
    held = lease(queue, run="run", lineage="one", incarnation="1")
    refused = refusal(queue, "two", incarnation="2")
    assert "'run'" in str(refused)
    assert "another run" in str(refused)
    assert refused.retry_after == SILENCE
    assert (state(queue, "a"), state(queue, "b")) == (State.LEASED, State.READY), "nothing of it was touched"
    assert [outcome.value for outcome in queue.extend([key(held)], 10.0)] == ["ok"]


def test_a_run_is_free_after_a_silence(queue: Queue, clock: Clock) -> None:
    ask_as(queue, "one")
    clock.advance(4)
    assert refusal(queue, "two").retry_after == pytest.approx(6)
    ask_as(queue, "one")
    assert refusal(queue, "two").retry_after == pytest.approx(10), "it was heard again"
    clock.advance(SILENCE)
    assert ask_as(queue, "two") is None
    assert refusal(queue, "one").retry_after == pytest.approx(10), "now it is the other's"


def test_leases_keep_a_run_for_half_their_time(queue: Queue, clock: Clock) -> None:
    """Their holder may be busy with a long step: heartbeats are a third of a lease's time apart."""
    make_ready(queue, upload("a", lineage="one"), upload("b", lineage="one"))
    held = [lease(queue, run="run", lineage="one", lease_seconds=120.0) for _ in range(2)]
    assert refusal(queue, "two").retry_after == pytest.approx(60)
    clock.advance(40)
    assert refusal(queue, "two").retry_after == pytest.approx(20)
    queue.extend([key(held[0])], 120.0)
    assert refusal(queue, "two").retry_after == pytest.approx(60)
    queue.ack([key(held[0])])
    assert refusal(queue, "two").retry_after == pytest.approx(60), "it holds another"
    queue.release([key(held[1])])
    assert refusal(queue, "two").retry_after == pytest.approx(SILENCE), "it holds none"


def test_a_stale_lease_is_no_sign_of_life(queue: Queue, clock: Clock) -> None:
    make_ready(queue, upload("a", lineage="one"))
    held = lease(queue, run="run", lineage="one")
    clock.advance(11)  # over the lease's time
    queue.extend([key(held)], 100.0)
    assert ask_as(queue, "two") is None


def test_other_runs_are_another_matter(queue: Queue) -> None:
    ask_as(queue, "one")
    assert ask(queue, run="other", lineage="two") is None


def test_a_restart_gives_the_holder_time_to_be_heard(backend: Backend, clock: Clock) -> None:
    with closing(backend.open(clock, make_limits())) as queue:
        ask_as(queue, "one")
    clock.advance(3)
    with closing(backend.open(clock, make_limits())) as queue:
        assert refusal(queue, "two").retry_after > 0
        clock.advance(SILENCE)
        assert ask_as(queue, "two") is None


# --- uploads that come too late


def test_workers_of_a_lineage_that_lost_its_run_do_not_fill_it(queue: Queue, clock: Clock) -> None:
    ask_as(queue, "new")
    for number in range(5):  # more than a run may have waiting
        assert queue.put(upload(f"old {number}", lineage="old")).state is State.EXPIRED
    assert queue.payload("old 0") is None
    assert queue.put(upload("mine", lineage="new")).state is State.QUEUED
    assert queue.put(upload("old 0", lineage="old")).created is False, "uploading again is harmless"


def test_a_lineage_may_upload_before_it_leases(queue: Queue, clock: Clock) -> None:
    ask_as(queue, "old")
    clock.advance(SILENCE)
    make_ready(queue, upload("a", lineage="new"))
    assert drain(queue, run="run", lineage="new") == ["a"]


# --- the end of a run


def test_what_a_finished_run_left_expires(queue: Queue) -> None:
    make_ready(queue, upload("done", lineage="one"), upload("ready", lineage="one"))
    queue.ack([key(lease(queue, run="run", lineage="one"))])
    queue.put(upload("queued", lineage="one"))
    assert queue.finish("run", "one") == 2
    assert outcomes(queue) == {
        "done": (State.DONE, None),
        "ready": (State.EXPIRED, "finished"),
        "queued": (State.EXPIRED, "finished"),
    }
    assert queue.finish("run", "one") == 0
    assert queue.activity.counts()[Count.EXPIRED_FINISHED] == 2


def test_what_comes_after_the_end_expires_too(queue: Queue) -> None:
    make_ready(queue, upload("given back", lineage="one"))
    held = lease(queue, run="run", lineage="one")
    queue.put(upload("scored", lineage="one"))
    queue.claim(1000)
    queue.finish("run", "one")
    queue.release([key(held)])
    queue.complete("scored", b"done")
    assert queue.put(upload("uploaded", lineage="one")).state is State.EXPIRED
    assert set(outcomes(queue).values()) == {(State.EXPIRED, "finished")}


def test_a_finished_run_is_free_at_once(queue: Queue) -> None:
    ask_as(queue, "one")
    queue.finish("run", "one")
    assert ask_as(queue, "two") is None


def test_a_finished_run_may_go_on(queue: Queue) -> None:
    ask_as(queue, "one")
    queue.finish("run", "one")
    ask_as(queue, "one")
    make_ready(queue, upload("a", lineage="one"))
    assert refusal(queue, "two").retry_after == SILENCE
    assert drain(queue, run="run", lineage="one") == ["a"]


def test_a_run_that_goes_on_gets_back_what_its_consumer_held(queue: Queue) -> None:
    make_ready(queue, upload("a", lineage="one"))
    ask_as(queue, "one", incarnation="1")
    queue.finish("run", "one")
    again = ask_as(queue, "one", incarnation="2")
    assert again and again.id == "a"


def test_what_its_consumer_held_of_a_finished_run_is_abandoned_for_another_lineage(queue: Queue) -> None:
    make_ready(queue, upload("a", lineage="one"))
    ask_as(queue, "one", incarnation="1")
    queue.finish("run", "one")
    assert ask_as(queue, "two", incarnation="2") is None
    assert outcomes(queue) == {"a": (State.EXPIRED, "abandoned")}


def test_the_end_of_one_lineage_is_not_that_of_another(queue: Queue, clock: Clock) -> None:
    ask_as(queue, "old")
    clock.advance(SILENCE)
    ask_as(queue, "new")
    queue.put(upload("a", lineage="new"))
    assert queue.finish("run", "old") == 0
    assert state(queue, "a") is State.QUEUED
    refusal(queue, "old")


def test_the_legacy_run_has_no_lineages(queue: Queue) -> None:
    make_ready(queue, upload("a", run=LEGACY_RUN))
    assert queue.take(LEGACY_RUN) is not None


def test_a_full_run_refuses_its_own_lineage(queue: Queue) -> None:
    ask_as(queue, "one")
    for number in range(3):
        queue.put(upload(f"{number}", lineage="one"))
    with pytest.raises(QueueFull):
        queue.put(upload("one more", lineage="one"))


# --- a run that moved to another store


def test_a_late_upload_after_a_move_is_never_trained(queue: Queue, tmp_path: Path) -> None:
    """The old store knows the id, or that the run has ended; the new one belongs to another training of the run."""
    make_ready(queue, upload("trained", lineage="one"))
    queue.ack([key(lease(queue, run="run", lineage="one"))])
    queue.finish("run", "one")
    again = queue.put(upload("trained", lineage="one"))
    assert (again.created, again.state) == (False, State.DONE)
    assert queue.put(upload("late", lineage="one")).state is State.EXPIRED
    assert queue.lease(LeaseBody(consumer="c")) == []
    with closing(SqliteQueue(tmp_path / "new" / "queue.sqlite", limits=make_limits())) as new:
        ask_as(new, "two")
        for id in ("trained", "late"):
            assert new.put(upload(id, lineage="one")).state is State.EXPIRED
        assert new.lease(LeaseBody(consumer="c")) == []
