"""Where uploads come in, and where most of them are sent away while the queue is full."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from ref_server.problem import Problem
from ref_server.queue.interface import NoRoom, QueueFull

# While the queue is full, so many uploads a second find out whether it still is, and so many at the same time.
SCOUTS_PER_SECOND = 32.0
MAX_SCOUTS = 16.0
# So long after the last upload that found no room, all are let in again.
MEMORY_SECONDS = 1.0
# Who is sent away hears of it so late, since not everyone heeds Retry-After.
DELAY_SECONDS = 1.0
_UPLOAD = ("POST", "/v1/batches")


class Door:
    """Remembers for a moment that the queue was full. Safe to use from any thread.

    To find that out, an upload is decoded, hashed, and taken to the store: under many times the load that the server
    can take, those that are refused would use up what those that are taken need. So while there is no room, only a few
    find out; all others are refused before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._full: NoRoom | None = None
        self._full_at = self._counted_at = clock()
        self._scouts = MAX_SCOUTS

    def closed(self) -> NoRoom | None:
        """Why there was no room lately, when enough others find out whether there is some now."""
        with self._lock:
            now = self._clock()
            self._scouts = min(MAX_SCOUTS, self._scouts + (now - self._counted_at) * SCOUTS_PER_SECOND)
            self._counted_at = now
            if now - self._full_at > MEMORY_SECONDS:
                self._full = None
            return self._full if self._scouts < 1 else None

    @contextmanager
    def admission(self) -> Iterator[None]:
        """Around the admission of an upload that was let in."""
        found = None
        with self._lock:
            self._scouts -= 1
        try:
            yield
        except NoRoom as full:
            found = full
            raise
        finally:
            with self._lock:
                if found is None:
                    self._scouts += 1
                else:
                    self._full, self._full_at = found, self._clock()


class Entrance:
    """ASGI middleware, inside of the guard: asks the door before an upload reaches its route."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        uploads = scope["type"] == "http" and (scope["method"], scope["path"]) == _UPLOAD
        if uploads and (full := self._door.closed()):
            await receive()  # the body, which the guard has read: it need not be kept meanwhile
            await asyncio.sleep(DELAY_SECONDS)
            await queue_full(full).answer(scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def queue_full(error: QueueFull) -> Problem:
    return Problem(429, "queue_full", str(error), headers={"Retry-After": str(max(1, round(error.retry_after)))})
