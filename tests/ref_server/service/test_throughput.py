"""The server's throughput over time, with a clock of the test's own."""

import time
from collections import Counter

import pytest

from ref_server.service.throughput import DAY, Throughput

NAMES = ("tokens", "uploaded", "taken", "working", "waiting")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def totals() -> Counter[str]:
    return Counter()


@pytest.fixture
def throughput(totals: Counter[str], clock: Clock) -> Throughput:
    return Throughput(lambda: {name: float(totals[name]) for name in NAMES}, clock)


def note(throughput: Throughput, totals: Counter[str], clock: Clock, **more: int) -> None:
    """Ten seconds later, with larger totals."""
    clock.now += 10
    totals.update(more)
    throughput.note()


def test_rates_are_those_between_two_totals(throughput: Throughput, totals: Counter[str], clock: Clock) -> None:
    assert throughput.rates(60).times == []
    throughput.note()
    assert throughput.rates(60).tokens == throughput.rates(DAY).tokens == []
    note(throughput, totals, clock, tokens=500, uploaded=20, taken=5, working=10)
    note(throughput, totals, clock, tokens=100, waiting=5)
    clock.now += 2
    for seconds in (60, DAY):
        rates = throughput.rates(seconds)
        assert rates.times[-1] == pytest.approx(time.time() - 2, abs=0.5)
    assert rates.tokens == [30], "a day has the newest totals, too"
    rates = throughput.rates(60)
    assert rates.times[1] - rates.times[0] == pytest.approx(10, abs=0.01)
    assert (rates.tokens, rates.uploaded, rates.taken) == ([50, 10], [2, 0], [0.5, 0])
    assert (rates.working, rates.waiting) == ([1, 0], [0, 0.5])
    assert throughput.rates(10).tokens == [10]


def test_a_day_is_kept_in_a_few_hundred_points(throughput: Throughput, totals: Counter[str], clock: Clock) -> None:
    for _ in range(3 * DAY // 20):
        note(throughput, totals, clock, tokens=10)
    hour, day = throughput.rates(3600), throughput.rates(DAY)
    assert (len(hour.times), len(day.times)) == (360, 361)
    assert {*hour.tokens} == {*day.tokens} == {1}
    assert hour.times[-1] - hour.times[0] == pytest.approx(3590, abs=0.01)
    assert day.times[-1] - day.times[0] == pytest.approx(DAY - 240, abs=240)
    assert len(throughput.rates(900).times) == 90
