"""The ledger by itself: what becomes of a batch that is leased again before, while and after it is trained."""

from collections.abc import Callable
from typing import Any

import pytest

from policy_trainer.queue_client.ledger import Fate, Ledger
from shared.api import Outcome
from shared.client import Leased


@pytest.fixture
def lease(make_scored: Any) -> Callable[..., Leased]:
    batch = make_scored([3], [[4], [5]], [0.0, 1.0])
    return lambda id, token="first": Leased(batch, id, token, 1)


def test_the_ids_are_sorted_and_those_of_an_earlier_life_wait_for_no_checkpoint(lease: Callable[..., Leased]) -> None:
    ledger = Ledger(["c", "a"])
    ledger.train([lease("b")])
    assert ledger.ids() == ["a", "b", "c"] and ledger.unsettled == 1


def test_a_trained_batch_that_comes_again_waits_for_a_checkpoint_and_is_acked_after_it(
    lease: Callable[..., Leased],
) -> None:
    ledger = Ledger(["earlier"])
    assert ledger.add(lease("earlier")) is Fate.ACK
    first, second = lease("a"), lease("a", "second")
    assert ledger.add(first) is Fate.TRAIN
    ledger.train([first])
    assert ledger.add(second) is Fate.WAIT
    ledger.settle(ledger.ids())
    assert ledger.add(lease("a", "third")) is Fate.ACK


def test_settling_acks_the_live_lease_of_what_was_trained_and_no_other(lease: Callable[..., Leased]) -> None:
    ledger = Ledger()
    old, new, lost, waiting = lease("a"), lease("a", "second"), lease("b"), lease("c")
    for own in (old, lost, waiting, new):
        ledger.add(own)
    ledger.train([old, lost])
    ledger.forget([lost])
    assert ledger.settle(ledger.ids()) == [new] and ledger.unsettled == 0
    assert ledger.ids() == ["a", "b"], "nothing was answered yet"


def test_what_was_not_answered_is_acked_again(lease: Callable[..., Leased]) -> None:
    ledger, leases = Ledger(), [lease(id) for id in "abcd"]
    for own in leases:
        ledger.add(own)
    ledger.train(leases)
    assert ledger.settle(ledger.ids()) == ledger.settle(ledger.ids()) == leases
    answers = (Outcome.OK, Outcome.ALREADY, Outcome.STALE, Outcome.UNKNOWN)
    ledger.acked(leases, dict(zip("abcd", answers, strict=True)))
    assert ledger.ids() == ["c", "d"] and not ledger.live() and not ledger.settle(ledger.ids())


def test_only_the_newest_live_lease_of_an_untrained_batch_can_be_trained(lease: Callable[..., Leased]) -> None:
    ledger = Ledger()
    old, new, lost, trained, again = lease("a"), lease("a", "2"), lease("b"), lease("c"), lease("c", "2")
    for own in (old, new, lost, trained, again):
        ledger.add(own)
    ledger.forget([lost])
    ledger.train([trained])
    assert ledger.trainable([old, new, lost, trained, again]) == [new]


def test_forgetting_an_old_lease_keeps_the_new_one(lease: Callable[..., Leased]) -> None:
    ledger, old, new = Ledger(), lease("a"), lease("a", "second")
    ledger.add(old)
    ledger.add(new)
    ledger.forget([old])
    ledger.acked([old], {"a": Outcome.STALE})
    assert ledger.live() == [new]


def test_what_is_given_back_at_the_end_was_not_trained(lease: Callable[..., Leased]) -> None:
    ledger, trained, other = Ledger(), lease("a"), lease("b")
    for own in (trained, other):
        ledger.add(own)
    ledger.train([trained])
    ledger.settle(ledger.ids())
    assert ledger.untrained() == [other]


def test_a_batch_that_the_checkpoint_lacks_stays_unsettled(lease: Callable[..., Leased]) -> None:
    """It was trained while the checkpoint was written."""
    ledger, (first, second) = Ledger(), (lease("a"), lease("b"))
    for own in (first, second):
        ledger.add(own)
    ledger.train([first])
    saved = ledger.ids()
    ledger.train([second])
    assert ledger.settle(saved) == [first] and ledger.unsettled == 1
    assert ledger.add(lease("b", "again")) is Fate.WAIT


def test_an_id_that_waits_for_a_checkpoint_is_not_dropped(lease: Callable[..., Leased]) -> None:
    """The weights on disk do not hold its batch yet, so it must stay in the ledger."""
    ledger = Ledger(["done"])
    ledger.train([lease("a")])
    ledger.drop(["a", "done"])
    assert ledger.ids() == ["a"]
