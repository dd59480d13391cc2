"""The ledger: which leases are live, and which ids a resumed run must remember. test_feed.py tests it with a server."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from policy_trainer.trainer.queue_client.ledger import Ledger
from shared.api import Outcome
from shared.client import Leased


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
