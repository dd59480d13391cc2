"""The loop that asks again: what it waits for, how long, and when it gives up."""

from collections.abc import Callable

import pytest

from shared.client import retry
from shared.client.retry import retried


class NotNow(Exception):
    def __init__(self, retry_after: float | None = None) -> None:
        super().__init__("not now")
        self.retry_after = retry_after


class Clock:
    """Time passes only in pauses."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(retry, "time", clock)
    monkeypatch.setattr(retry.random, "uniform", lambda low, high: high)
    return clock


def reason(error: Exception) -> str | None:
    return "it comes back" if isinstance(error, NotNow) else None


def failing(*errors: Exception) -> Callable[[], str]:
    left = list(errors)

    def work() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return work


def test_pauses_double_up_to_the_longest(clock: Clock) -> None:
    waits: list[tuple[str, float]] = []
    work = failing(*[NotNow() for _ in range(5)], NotNow(7.0))
    assert retried(work, reason, lambda why, waited: waits.append((why, waited)), longest=1.0) == "done"
    assert clock.pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 7.0])
    assert [why for why, _ in waits] == ["it comes back"] * 6
    assert [waited for _, waited in waits] == pytest.approx([0.0, 0.1, 0.3, 0.7, 1.5, 2.5])


def test_other_errors_are_raised_at_once(clock: Clock) -> None:
    with pytest.raises(ValueError, match="a bug"):
        retried(failing(NotNow(), ValueError("a bug")), reason, None)
    assert len(clock.pauses) == 1


@pytest.mark.parametrize(("errors", "pauses"), [([NotNow(3.0)] * 2, [3.0]), ([NotNow(5.0)], [])])
def test_a_pause_beyond_patience_is_not_begun(clock: Clock, errors: list[NotNow], pauses: list[float]) -> None:
    with pytest.raises(NotNow):
        retried(failing(*errors), reason, None, patience=5.0)
    assert clock.pauses == pauses


def test_the_last_attempt_is_made_when_patience_ends(clock: Clock) -> None:
    with pytest.raises(NotNow):
        retried(failing(*[NotNow()] * 99), reason, None, patience=8.0, longest=10.0)
    assert clock.now == pytest.approx(8.0)


def test_a_server_that_asks_for_no_pause_gets_one(clock: Clock) -> None:
    assert retried(failing(*[NotNow(0.0)] * 3), reason, None) == "done"
    assert clock.pauses == pytest.approx([0.1, 0.2, 0.4])


def test_patience_begins_anew_with_progress(clock: Clock) -> None:
    done = iter(range(100))
    errors = [NotNow(3.0)] * 9
    assert retried(failing(*errors), reason, None, patience=5.0, progress=lambda: next(done)) == "done"
