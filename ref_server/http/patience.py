"""Asking what may be silent."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from anyio import CapacityLimiter, to_thread

T = TypeVar("T")


class Question(Generic[T]):
    """Asks on a thread of its own, one question at a time: who asks meanwhile gets the same answer."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        self._thread = CapacityLimiter(1)
        self._asked: asyncio.Task[T] | None = None

    async def answer(self, patience: float) -> T:
        """What `ask` returns or raises. Raises TimeoutError after so many seconds, while the question stays open."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(to_thread.run_sync(self._ask, limiter=self._thread))
        return await asyncio.wait_for(asyncio.shield(self._asked), patience)
