"""Threads for work on request bodies, so that no other request waits for it."""

from collections.abc import Callable
from typing import TypeVar

from anyio import CapacityLimiter, to_thread

from ref_server.scoring.reference import Busy

T = TypeVar("T")


class BodyThreads:
    """Runs at most `threads` calls at once. Others wait, up to `most` calls in all."""

    def __init__(self, *, threads: int, most: int) -> None:
        self._limiter = CapacityLimiter(threads)
        self._most = most
        self._calls = 0

    async def run(self, call: Callable[[], T]) -> T:
        """What the call returns or raises. Raises Busy when `most` calls run or wait already."""
        if self._calls >= self._most:
            raise Busy(f"{self._most} bodies are being processed already")
        self._calls += 1
        try:
            return await to_thread.run_sync(call, limiter=self._limiter)
        finally:
            self._calls -= 1
