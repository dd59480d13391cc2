"""Both clients behind one interface, so that every test is of both."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from inspect import isasyncgen, iscoroutine
from typing import Any

import pytest

from shared.client import AsyncRefServerClient, RefServerClient
from tests.site import no_backoff, open_site

__all__ = ["no_backoff", "open_site"]


class Loop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def wait(self, value: Any) -> Any:
        """What becomes of a coroutine, or the items of an asynchronous iterator; anything else as it is."""
        if isasyncgen(value):
            value = self._items(value)
        return asyncio.run_coroutine_threadsafe(value, self.loop).result() if iscoroutine(value) else value

    @staticmethod
    async def _items(values: Any) -> list[Any]:
        return [value async for value in values]

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Waiting:
    """An asynchronous client that is waited for."""

    def __init__(self, client: AsyncRefServerClient, loop: Loop) -> None:
        self._client = client
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *args, **kwargs: self._loop.wait(method(*args, **kwargs))


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture(params=[RefServerClient, AsyncRefServerClient])
def connect(request: pytest.FixtureRequest, loop: Loop) -> Iterator[Callable[..., Any]]:
    """Opens a client of either kind; its methods are called as those of RefServerClient."""
    clients: list[Any] = []

    def make(url: str, **options: Any) -> Any:
        client = request.param(url, **options)
        clients.append(Waiting(client, loop) if isinstance(client, AsyncRefServerClient) else client)
        return clients[-1]

    yield make
    for client in clients:
        client.close()
