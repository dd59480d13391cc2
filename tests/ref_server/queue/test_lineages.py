"""Which training owns a run, and which batches are useless to it: stale, abandoned, finished."""

import pytest

from ref_server.queue.errors import EpochAhead, RunTaken
from ref_server.queue.queue import Queue
from shared.api import Lease, State
from tests.ref_server.queue.backends import Clock
from tests.ref_server.queue.batches import drain, key, lease, lease_many, lose, make_ready, reason, state, upload

LIMITS = {"max_batches_per_run": 6}
SILENCE = 10.0


def lease_as(queue: Queue, lineage: str | None, **request) -> list[Lease]:
    return lease_many(queue, run="run", lineage=lineage, **request)


def retry_after(queue: Queue, lineage: str | None) -> float:
    """How long the refusal says that another lineage holds the run."""
    with pytest.raises(RunTaken) as refused:
        lease_as(queue, lineage)
    return refused.value.retry_after


# --- staleness


def test_batches_older_than_the_lag_expire_as_stale(queue: Queue) -> None:
    make_ready(queue, upload("old", version=6), upload("good", version=7))
    queue.put(upload("old and queued", version=6))
    assert drain(queue, run="run", policy_version=9, max_lag=2) == ["good"]
    assert reason(queue, "old") == reason(queue, "old and queued") == "stale"
    assert queue.payload("old") is not None


# --- epochs


def outcomes(queue: Queue) -> dict[str, tuple[State, str | None]]:
    return {batch.id: (batch.state, batch.reason) for batch in queue.list(None, None, 100, None).batches}


def test_a_batch_lost_in_training_is_leased_once_more_before_it_is_stale(queue: Queue, clock: Clock) -> None:
    """A checkpoint may contain its effect; its trainer then acks it."""
    make_ready(queue, upload("a", version=0), upload("b", version=0))
    lose(queue, clock, started=True)
    now = {"run": "run", "policy_version": 9, "max_lag": 2}
    held = lease(queue, **now)
    assert (held.id, reason(queue, "b")) == ("a", "stale")
    queue.release([key(held)])
    assert lease_many(queue, **now) == []
    assert reason(queue, "a") == "stale"


def test_an_older_epoch_is_good_up_to_the_fork(queue: Queue) -> None:
    make_ready(queue, upload("before", version=4), upload("at", version=5), upload("after", version=6))
    queue.put(upload("after and queued", version=6))
    make_ready(queue, upload("other", run="other", version=9), upload("newer", epoch=2, version=0))
    assert drain(queue, run="run", epoch=1, policy_version=5, max_lag=1) == ["before", "at"]
    assert outcomes(queue)["after"] == outcomes(queue)["after and queued"] == (State.EXPIRED, "abandoned")
    assert state(queue, "other") is state(queue, "newer") is State.READY, "neither leased nor expired"
    make_ready(queue, upload("late", version=6), upload("new", epoch=1, version=6))
    assert drain(queue, run="run", epoch=1, policy_version=8) == ["new"], "the fork is where the epoch began"
    assert reason(queue, "late") == "abandoned"


@pytest.mark.parametrize(("first", "second", "good"), [(8, 5, ["0 at 5", "2"]), (5, 8, ["0 at 5", "1 at 7", "2"])])
def test_the_earliest_fork_since_an_epoch_decides(queue: Queue, first: int, second: int, good: list[str]) -> None:
    """first, second: where epoch 1 left epoch 0, and where epoch 2 left epoch 1."""
    lease_many(queue, run="run", epoch=1, policy_version=first)
    make_ready(
        queue,
        upload("0 at 5", version=5),
        upload("0 at 6", version=6),
        upload("1 at 7", epoch=1, version=7),
        upload("2", epoch=2, version=9),
    )
    assert drain(queue, run="run", epoch=2, policy_version=second) == good
    assert reason(queue, "0 at 6") == "abandoned"


def test_an_upload_is_at_most_one_epoch_ahead_of_its_trainer(queue: Queue) -> None:
    """An epoch that no trainer opens is never leased, and would fill its run."""
    queue.put(upload("nobody trains yet", lineage="one", epoch=2**62))
    lease_as(queue, "one", epoch=3, policy_version=7)
    queue.put(upload("next", lineage="one", epoch=4))
    with pytest.raises(EpochAhead, match="at most 4, since the trainer of run 'run' is in 3; got 5"):
        queue.put(upload("ahead", lineage="one", epoch=5))
    assert queue.get("ahead") is None
    assert not queue.put(upload("nobody trains yet", lineage="one", epoch=2**62)).created
    assert queue.put(upload("other", run="other", lineage="one", epoch=5)).created
    lease_as(queue, "one", epoch=4, policy_version=7)
    assert queue.put(upload("ahead", lineage="one", epoch=5)).created


# --- who holds a run


def test_a_run_of_a_working_trainer_is_not_taken(queue: Queue) -> None:
    make_ready(queue, upload("a", lineage="one"), upload("b", lineage="one"))
    held = lease(queue, run="run", lineage="one", incarnation="1")
    with pytest.raises(RunTaken, match=r"run 'run' is another training's.*or choose another run"):
        lease_as(queue, "two", incarnation="2")
    assert (state(queue, "a"), state(queue, "b")) == (State.LEASED, State.READY)
    assert lease_many(queue, run="other", lineage="two") == [], "other runs are free"
    assert lease_as(queue, "one", incarnation="2")[0].id == held.id, "its next incarnation takes over"


def test_a_run_is_free_after_a_silence(queue: Queue, clock: Clock) -> None:
    lease_as(queue, "one")
    clock.advance(4)
    assert retry_after(queue, "two") == pytest.approx(6)
    lease_as(queue, "one")
    assert retry_after(queue, "two") == pytest.approx(SILENCE)
    clock.advance(SILENCE)
    make_ready(queue, upload("a", lineage="two"))
    assert lease_as(queue, "two"), "its workers may upload before it leases"
    assert retry_after(queue, "one") == pytest.approx(SILENCE)


def test_leases_hold_a_run_for_half_their_time(queue: Queue, clock: Clock) -> None:
    """Their consumer may be busy with a long step: heartbeats are a third of a lease's time apart."""
    make_ready(queue, upload("a", lineage="one"), upload("b", lineage="one"))
    held = [lease(queue, run="run", lineage="one", lease_seconds=120.0) for _ in range(2)]
    assert retry_after(queue, "two") == pytest.approx(60)
    clock.advance(40)
    assert retry_after(queue, "two") == pytest.approx(20)
    queue.extend([key(held[0])], 120.0)
    assert retry_after(queue, "two") == pytest.approx(60)
    queue.ack([key(held[0])])
    assert retry_after(queue, "two") == pytest.approx(60), "it holds another lease"
    queue.release([key(held[1])])
    assert retry_after(queue, "two") == pytest.approx(SILENCE), "it holds none"
