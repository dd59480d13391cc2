"""Bodies processed in threads: how many at once, and how many may wait."""

import asyncio
import threading

import pytest

from ref_server.http.bodies import BodyThreads
from ref_server.scoring.reference import Busy


def test_some_run_some_wait_and_the_rest_are_sent_away() -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()
    running: list[int] = []

    def work() -> int:
        running.append(1)
        begun.release()
        assert go_on.wait(60)
        return len(running)

    async def scenario() -> list[int]:
        threads = BodyThreads(threads=2, most=3)
        calls = [asyncio.create_task(threads.run(work)) for _ in range(3)]
        for _ in range(2):
            await asyncio.to_thread(begun.acquire)
        with pytest.raises(Busy, match="3 bodies"):
            await threads.run(work)
        assert len(running) == 2, "the third waits for a thread"
        go_on.set()
        await asyncio.gather(*calls)
        return [await threads.run(work) for _ in range(4)]

    assert asyncio.run(scenario()) == [4, 5, 6, 7]
