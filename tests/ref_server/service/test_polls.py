"""Who is woken when batches become ready: as many as there are batches, in the order of arrival."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

from ref_server.queue.errors import StorageBroken
from ref_server.queue.records import Wanted
from ref_server.scoring.reference import Busy
from ref_server.service.polls import Polls


class Store:
    """Answers looks with what a test puts there, once, and records its arguments."""

    def __init__(self) -> None:
        self.ready: dict[Wanted, int] = {}
        self.broken = False
        self.looks: list[tuple[dict[Wanted, int], set[tuple[str, str]]]] = []

    def count_leasable(self, waiting: Mapping[Wanted, int], alive: Collection[tuple[str, str]]) -> dict[Wanted, int]:
        self.looks.append((dict(waiting), set(alive)))
        if self.broken:
            raise StorageBroken("gone")
        ready, self.ready = self.ready, {}
        return ready


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ref_server.service.polls.LOOK_SECONDS", 0.01)


@asynccontextmanager
async def watched(polls: Polls, store: Any) -> AsyncIterator[None]:
    watch = asyncio.create_task(polls.watch(store))
    await asyncio.sleep(0)
    yield
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch


class Line:
    """Polls that wait, and the order in which they were woken and left."""

    def __init__(self, polls: Polls) -> None:
        self.polls = polls
        self.woken: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def join(self, name: str, wanted: Wanted) -> None:
        self.tasks.append(asyncio.create_task(self._wait(name, wanted)))
        await asyncio.sleep(0)

    async def _wait(self, name: str, wanted: Wanted) -> None:
        with self.polls.join(wanted, name) as place:
            if await place.wait(60):
                place.looked()
                self.woken.append(name)

    async def wakes(self, expected: list[str], act: Callable[[], Any]) -> None:
        """Asserts that an act wakes these, and soon after no others."""
        self.woken.clear()
        act()
        async with asyncio.timeout(30):
            while len(self.woken) < len(expected):
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.03)
        assert self.woken == expected

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def play(scenario: Callable[[Polls, Store, Line], Awaitable[None]]) -> Store:
    store, polls = Store(), Polls()

    async def run() -> None:
        line = Line(polls)
        async with watched(polls, store):
            await scenario(polls, store, line)
            await line.end()

    asyncio.run(run())
    return store


def test_as_many_are_woken_as_there_are_batches_in_the_order_of_arrival() -> None:
    async def scenario(polls: Polls, store: Store, line: Line) -> None:
        for name, run in (("a1", "a"), ("b1", "b"), ("any", None), ("a2", "a"), ("a3", "a")):
            await line.join(name, Wanted(run))
        await asyncio.sleep(0.02)
        await line.wakes(["a1"], lambda: polls.ring("a"))
        await line.wakes(["any"], lambda: polls.ring("a"))
        await line.wakes(["a2", "b1"], lambda: store.ready.update({Wanted("a"): 1, Wanted("b"): 3}))

    play(scenario)


def test_a_look_wakes_those_who_may_have_what_was_found() -> None:
    async def scenario(polls: Polls, store: Store, line: Line) -> None:
        for epoch in (0, 1, 0):
            await line.join(f"{epoch} {len(line.tasks)}", Wanted("a", "l", epoch))
        await line.wakes(["1 1"], lambda: store.ready.update({Wanted("a", "l", 1): 2}))

    play(scenario)


def test_one_look_serves_all_waiting_requests_and_reports_their_lineages() -> None:
    async def scenario(polls: Polls, store: Store, line: Line) -> None:
        for number in range(100):
            await line.join(str(number), Wanted("a", "l"))
        await line.join("any", Wanted(None))
        await asyncio.sleep(0.1)

    looks = play(scenario).looks
    assert {Wanted("a", "l"): 100, Wanted(None): 1} in [waiting for waiting, _ in looks]
    reports = [alive for _, alive in looks if alive]
    assert reports[0] == {("a", "l")}
    assert len(reports) < len(looks), "not at every look"


def test_the_store_is_not_polled_while_no_request_waits() -> None:
    async def scenario(polls: Polls, store: Store, line: Line) -> None:
        with polls.join(Wanted("a"), "someone"):
            pass
        polls.look_now()
        await asyncio.sleep(0.1)

    assert len(play(scenario).looks) <= 1


def test_a_request_that_leaves_passes_its_wake_on() -> None:
    async def scenario(polls: Polls, store: Store, line: Line) -> None:
        with polls.join(Wanted("a"), "first") as first:
            await line.join("second", Wanted("a"))
            await asyncio.sleep(0.01)
            polls.ring("a")
            assert await first.wait(30)
            assert line.woken == []
        await line.wakes(["second"], lambda: None)

    play(scenario)


def test_a_wake_that_comes_while_one_looks_is_not_lost() -> None:
    async def scenario(polls: Polls, store: Store, line: Line) -> None:
        with polls.join(Wanted("a"), "first") as first:
            polls.ring("a")  # it has not waited yet: it looks
            await asyncio.sleep(0.01)
            assert await first.wait(0)

    play(scenario)


def test_all_are_woken_when_the_store_breaks() -> None:
    async def scenario(polls: Polls, store: Store, line: Line) -> None:
        await line.join("a", Wanted("a"))
        await line.join("b", Wanted("b"))
        await line.wakes(["a", "b"], lambda: setattr(store, "broken", True))

    play(scenario)


def test_a_client_may_wait_with_as_many_requests_as_are_free() -> None:
    polls = Polls(most=4)
    with ExitStack() as stays:
        for _ in range(2):
            stays.enter_context(polls.join(Wanted("a"), "greedy"))
        with pytest.raises(Busy, match="greedy"):
            stays.enter_context(polls.join(Wanted("a"), "greedy"))
        stays.enter_context(polls.join(Wanted("a"), "other"))
    with polls.join(Wanted("a"), "greedy"), polls.join(Wanted("b"), "greedy"):
        pass
