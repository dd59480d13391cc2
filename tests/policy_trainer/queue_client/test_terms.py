"""Whether another trainer lives, told from how the server refuses leases."""

import pytest

from policy_trainer.lifecycle.endings import RunFailed
from policy_trainer.queue_client.terms import LeaseRefusals
from shared.client import RefServerError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def taken(retry_after: float) -> RefServerError:
    return RefServerError(409, "taken", code="run_taken", field="run", retry_after=retry_after)


def test_a_trainer_that_is_silent_is_waited_for() -> None:
    clock = Clock()
    takeover = LeaseRefusals("mine", clock)
    assert takeover.reason is None
    for left in (60, 59, 58, 58, 56, 20, 1):  # as the server rounds up
        clock.now = 160 - left
        assert takeover.refused(taken(left)) == 1
        assert takeover.reason == (
            "run 'mine' was trained by another trainer a moment ago: waiting up to 60 s to see whether it lives"
        )


def test_a_trainer_that_is_heard_again_lives() -> None:
    clock = Clock()
    takeover = LeaseRefusals("mine", clock)
    takeover.refused(taken(10))
    clock.now += 1
    takeover.refused(taken(10))  # within the rounding
    clock.now += 1
    with pytest.raises(RunFailed) as failed:
        takeover.refused(taken(10))
    assert str(failed.value).splitlines() == [
        "run: another trainer trains a run named 'mine' on this server.",
        "Stop that one, or choose another name with --run, or another --run-dir",
    ]


def test_it_is_noticed_though_its_last_lease_was_settled_meanwhile() -> None:
    clock = Clock()
    takeover = LeaseRefusals("mine", clock)
    for seconds in (60, 10):
        takeover.refused(taken(seconds))
    clock.now += 3
    with pytest.raises(RunFailed):
        takeover.refused(taken(10))


def test_a_run_that_is_lost_is_not_waited_for() -> None:
    takeover = LeaseRefusals("mine")
    takeover.admitted()
    with pytest.raises(RunFailed, match="has taken it from this one"):
        takeover.refused(taken(10))


def test_a_copy_of_the_directory_is_named() -> None:
    with pytest.raises(RunFailed, match="copy of this run's directory"):
        LeaseRefusals("mine").refused(RefServerError(409, "a newer incarnation", code="superseded"))


def test_other_refusals_are_what_they_are() -> None:
    with pytest.raises(RefServerError, match="no"):
        LeaseRefusals("mine").refused(RefServerError(422, "no", code="invalid_request"))
