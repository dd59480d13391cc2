"""The ledger: which leases are live, and which ids a resumed run must remember. test_feed.py tests it with a server."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from policy_trainer.trainer.queue_client.ledger import Ledger, drop_done
from shared.api import Outcome, State
from shared.client import Leased, RefServerClient, RefServerError


@pytest.fixture
def lease(make_scored: Any) -> Callable[..., Leased]:
    batch = make_scored([3], [[4], [5]], [0.0, 1.0])
    return lambda id, token="first": Leased(batch, id, token, 1)


def ledger_with(*leases: Leased, trained: Sequence[Leased] = ()) -> Ledger:
    ledger = Ledger()
    for lease in leases:
        ledger.add([lease])
    ledger.mark_trained(trained)
    return ledger


def test_ids_are_sorted_and_those_of_an_earlier_process_wait_for_no_checkpoint(lease: Callable[..., Leased]) -> None:
    ledger = Ledger(["c", "a"])
    ledger.mark_trained([lease("b")])
    assert ledger.ids() == ["a", "b", "c"] and ledger.unsettled == 1
    old, new = lease("a"), lease("d")
    assert ledger.add([old, new]) == ([new], [old]), "to train on, and to ack"


def test_settling_returns_only_live_leases_of_trained_batches(lease: Callable[..., Leased]) -> None:
    old, new, lost, waiting = lease("a"), lease("a", "second"), lease("b"), lease("c")
    ledger = ledger_with(old, lost, waiting, new, trained=[old, lost])
    ledger.forget([lost])
    assert ledger.settle(ledger.ids()) == [new] and ledger.unsettled == 0
    assert ledger.ids() == ["a", "b"], "nothing was answered yet"
    assert ledger.settle(["a", "b", "c"]) == [new], "a batch that was not trained must not be acked"


def test_only_live_leases_of_batches_that_were_not_trained_are_trainable(lease: Callable[..., Leased]) -> None:
    old, new, lost, waiting = lease("a"), lease("a", "second"), lease("b"), lease("c")
    ledger = ledger_with(old, lost, waiting, trained=[old])
    ledger.add([new])
    ledger.forget([lost])
    assert ledger.trainable([old, new, lost, waiting]) == ledger.untrained() == [waiting]


def test_only_confirmed_acks_leave(lease: Callable[..., Leased]) -> None:
    leases = [lease(id) for id in "abcd"]
    ledger = ledger_with(*leases, trained=leases)
    assert ledger.settle(ledger.ids()) == ledger.settle(ledger.ids()) == leases
    answers = (Outcome.OK, Outcome.ALREADY, Outcome.STALE, Outcome.UNKNOWN)
    ledger.acked(leases, dict(zip("abcd", answers, strict=True)))
    assert ledger.ids() == ["c", "d"] and not ledger.live() and not ledger.settle(ledger.ids())


def test_forgetting_an_old_lease_keeps_the_new_one(lease: Callable[..., Leased]) -> None:
    old, new = lease("a"), lease("a", "second")
    ledger = ledger_with(old, new)
    ledger.forget([old])
    ledger.acked([old], {"a": Outcome.STALE})
    assert ledger.live() == [new]


def test_a_batch_that_trained_while_the_checkpoint_was_written_stays_unsettled(lease: Callable[..., Leased]) -> None:
    first, second = lease("a"), lease("b")
    ledger = ledger_with(first, second, trained=[first])
    saved = ledger.ids()
    ledger.mark_trained([second])
    assert ledger.settle(saved) == [first] and ledger.unsettled == 1
    assert ledger.add([lease("b", "again")]) == ([], [])


def test_an_id_that_waits_for_a_checkpoint_is_not_dropped(lease: Callable[..., Leased]) -> None:
    """The weights on disk do not hold its batch yet."""
    ledger = Ledger(["done"])
    ledger.mark_trained([lease("a")])
    ledger.drop(["a", "done"])
    assert ledger.ids() == ["a"]


def test_a_refused_lease_is_live_no_longer_and_is_counted(lease: Callable[..., Leased]) -> None:
    ledger = ledger_with(lease("a"), lease("b"), lease("b", "second"))
    ledger.refuse(lease("a"))
    ledger.refuse(lease("b"))
    assert [held.token for held in ledger.live()] == ["second"], "a newer lease of the same batch stays"
    assert ledger.refused == 2


class Server:
    """Reports the states of batches. In place of a state it may have the HTTP status of an error."""

    def __init__(self, states: dict[str, State | int]) -> None:
        self._states = states
        self.asked: list[str] = []

    def batch(self, id: str) -> SimpleNamespace:
        self.asked.append(id)
        state = self._states[id]
        if isinstance(state, int):
            raise RefServerError(state, "an error")
        return SimpleNamespace(state=state)


def test_only_batches_that_will_not_come_again_are_logged() -> None:
    coming = (State.QUEUED, State.SCORING, State.READY, State.LEASED)
    server = Server({**{state.value: state for state in coming}, "done": State.DONE, "dead": State.DEAD, "gone": 404})
    ledger = Ledger(["done", "dead", "gone", *(state.value for state in coming)])
    with capture_logs() as events:
        drop_done(cast(RefServerClient, server), ledger, ledger.ids(), lambda: False)
    assert ledger.ids() == sorted({"dead", "gone", *(state.value for state in coming)})
    (event,) = events
    assert {name: event[name] for name in event if name not in ("event", "log_level")} == {"dead": 1, "unknown": 1}


def test_an_error_of_the_server_is_not_taken_for_an_unknown_batch() -> None:
    ledger = Ledger(["a", "b"])
    with pytest.raises(RefServerError), capture_logs() as events:
        drop_done(cast(RefServerClient, Server({"a": 503, "b": 404})), ledger, ledger.ids(), lambda: False)
    assert ledger.ids() == ["a", "b"] and not events


def test_no_more_batches_are_asked_for_once_it_is_stopped() -> None:
    server = Server(dict.fromkeys("abc", State.DONE))
    ledger = Ledger("abc")
    drop_done(cast(RefServerClient, server), ledger, ledger.ids(), lambda: len(server.asked) == 2)
    assert server.asked == ["a", "b"] and ledger.ids() == ["c"]
