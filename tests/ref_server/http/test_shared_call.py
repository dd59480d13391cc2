"""Calls that many requests share."""

import asyncio

import pytest

from ref_server.http.shared_call import SharedCall


class Call:
    """Counts its calls, each of which takes some seconds of its clock."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.now = 100.0
        self.calls = 0
        self._seconds = seconds

    def __call__(self) -> int:
        self.calls += 1
        self.now += self._seconds
        return self.calls

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "terms", "waits", "answers"),
    [
        (0.0, {}, (0.0, 0.0), [1, 2]),
        (0.0, {"fresh_seconds": 1.0}, (0.0, 0.5, 0.4, 0.2), [1, 1, 1, 2]),
        (2.0, {"fresh_seconds": 1.0}, (0.0, 0.1), [1, 2]),
        (0.5, {"rest": 10.0}, (0.0, 4.9, 0.2, 4.9), [1, 1, 2, 2]),
    ],
)
def test_a_result_is_given_again_while_it_is_fresh(
    seconds: float, terms: dict[str, float], waits: tuple[float, ...], answers: list[int]
) -> None:
    call = Call(seconds)

    async def play() -> list[int]:
        shared, results = SharedCall(call, clock=call.clock, **terms), []
        for wait in waits:
            call.now += wait
            results.append(await shared.result(60))
        return results

    assert asyncio.run(play()) == answers


def test_concurrent_callers_get_one_result() -> None:
    call = Call()

    async def play() -> list[int]:
        shared = SharedCall(call)
        return await asyncio.gather(*(shared.result(60) for _ in range(100)))

    assert asyncio.run(play()) == [1] * 100
