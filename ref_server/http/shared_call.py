"""Calls that many requests share, for a store that may not answer."""

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from anyio import CapacityLimiter, to_thread

from ref_server.queue.errors import StorageBroken
from ref_server.queue.queue import Queue
from ref_server.queue.records import Stats

T = TypeVar("T")


class SharedCall(Generic[T]):
    """Makes one call at a time, on its own thread. All callers that wait meanwhile get the same result.

    A result is given again for fresh_seconds, and for `rest` times as long as the call took, so that many callers cost
    hardly more than one.
    """

    def __init__(
        self,
        call: Callable[[], T],
        *,
        fresh_seconds: float = 0.0,
        rest: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._call = call
        self._fresh_seconds = fresh_seconds
        self._clock = clock
        self._thread = CapacityLimiter(1)
        self._running: asyncio.Task[T] | None = None
        self._rest = rest
        self._fresh_until = 0.0

    async def result(self, timeout: float) -> T:
        """What the call returns or raises. Raises TimeoutError after `timeout` seconds; the call goes on."""
        if self._running is None or (self._running.done() and self._clock() >= self._fresh_until):
            self._running = asyncio.create_task(self._run())
        return await asyncio.wait_for(asyncio.shield(self._running), timeout)

    async def _run(self) -> T:
        began = self._clock()
        try:
            return await to_thread.run_sync(self._call, limiter=self._thread)
        finally:
            took = self._clock() - began
            self._fresh_until = began + took + max(self._fresh_seconds - took, self._rest * took)


# After a read of the depths, the next one waits ten times as long as it took: callers get the result of the last one.
_REST = 10.0
_SECONDS = 30.0


class QueueStats:
    def __init__(self, queue: Queue) -> None:
        self._call = SharedCall(queue.stats, rest=_REST)

    async def now(self) -> Stats:
        """Raises StorageBroken where the store does not answer."""
        try:
            return await self._call.result(_SECONDS)
        except TimeoutError:
            raise StorageBroken(f"the store has not answered for {_SECONDS:g} s") from None
