"""A shared call with a timeout, for a store that may not answer."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from anyio import CapacityLimiter, to_thread

T = TypeVar("T")


class SharedCall(Generic[T]):
    """Makes one call at a time, on a thread of its own. All who wait meanwhile get the same result."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._thread = CapacityLimiter(1)
        self._running: asyncio.Task[T] | None = None

    async def result(self, timeout: float) -> T:
        """What the call returns or raises. Raises TimeoutError after `timeout` seconds; the call goes on."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(to_thread.run_sync(self._call, limiter=self._thread))
        return await asyncio.wait_for(asyncio.shield(self._running), timeout)
