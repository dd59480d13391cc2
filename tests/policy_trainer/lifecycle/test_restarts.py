"""A child that dies is started again, with longer and longer pauses, until that is no help."""

from pathlib import Path
from typing import Any

import pytest

from policy_trainer.lifecycle import restarts
from policy_trainer.lifecycle.endings import RunFailed
from policy_trainer.lifecycle.restarts import RestartedChild
from tests.policy_trainer.children import Clock, FakeChild


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(restarts, "time", made)
    return made


@pytest.fixture
def child() -> FakeChild:
    return FakeChild("sorter", "module", [], Path(), {})


@pytest.fixture
def notes() -> list[str]:
    return []


def restarted(child: Any, notes: list[str], **settings: Any) -> RestartedChild:
    made = RestartedChild(child, notes.append, **settings)
    made.start()
    return made


def test_it_is_left_alone_while_it_runs(child: FakeChild, notes: list[str]) -> None:
    process = restarted(child, notes)
    process.check()
    assert process.pid == 1 and process.epitaph is None and not notes
    process.stop()
    assert child.stopped


def test_it_is_given_up_when_it_always_dies(child: FakeChild, notes: list[str], clock: Clock) -> None:
    process = restarted(child, notes, futile=" without a letter")
    for death, pause in enumerate([1, 2, 4, 8], 1):
        child.die()
        process.check()
        assert len(notes) == death
        assert "the sorter died with status 7" in notes[-1] and "I cannot go on" in notes[-1]
        clock.now += pause - 0.01
        process.check()
        assert child.pid == death and len(notes) == death, "it is noted once, and rests"
        clock.now += 0.02
        process.check()
        assert child.pid == death + 1, "it is started again"
    child.die()
    with pytest.raises(RunFailed, match=r"(?s)I cannot go on.*died 5 times without a letter"):
        process.check()


def test_deaths_are_counted_anew_after_a_success(child: FakeChild, notes: list[str], clock: Clock) -> None:
    process = restarted(child, notes)
    for _ in range(7):
        child.die()
        process.check()
        clock.now += 1.01
        process.check()
        process.succeeded()
    assert len(notes) == child.pid - 1 == 7


def test_and_after_a_long_life(child: FakeChild, notes: list[str], clock: Clock) -> None:
    process = restarted(child, notes, lasting=100)
    for _ in range(7):
        clock.now += 100
        child.die()
        process.check()
        clock.now += 1.01
        process.check()
    assert len(notes) == child.pid - 1 == 7


def test_one_that_refuses_its_settings_is_not_started_again(child: FakeChild, notes: list[str]) -> None:
    process = restarted(child, notes)
    child.die(status=2)
    with pytest.raises(RunFailed, match=r"(?s)status 2.*I cannot go on"):
        process.check()
