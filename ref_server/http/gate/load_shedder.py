"""Sheds load: refuses most uploads early while the queue is full."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from ref_server.http.problem import no_room
from ref_server.queue.interface import NoRoom

# While the queue is full, this many uploads a second probe whether it still is, and this many at the same time.
PROBES_PER_SECOND = 32.0
MAX_PROBES = 16.0
# All uploads are let in again this long after the last one that found no room.
MEMORY_SECONDS = 5.0
# Delay each 429: some clients ignore Retry-After.
DELAY_SECONDS = 1.0
_UPLOAD = ("POST", "/v1/batches")
_CODE = "queue_full"


class LoadShedder:
    """Remembers for a moment that the queue was full. Used on the event loop, except `note`.

    The queue finds out that it is full only after an upload was decoded and hashed. Under overload, refused
    uploads would use up the time that accepted ones need. So while there is no room, only a few uploads are let in as
    probes, and all others are refused. A probe that met no full queue is not counted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full: NoRoom | None = None
        self._full_at = self._counted_at = clock()
        self._probes = MAX_PROBES

    def note(self, full: NoRoom) -> None:
        """Notes that an upload found no room. Any thread may call it."""
        self._full, self._full_at = full, self._clock()

    def refusal(self) -> NoRoom | None:
        """Why there was no room lately, when no probe is left; None lets an upload in."""
        now = self._clock()
        if now - self._full_at > MEMORY_SECONDS:
            self._full = None
        self._probes = min(MAX_PROBES, self._probes + (now - self._counted_at) * PROBES_PER_SECOND)
        self._counted_at = now
        return self._full if self._probes < 1 else None

    @contextmanager
    def admission(self, scope: Scope) -> Iterator[None]:
        """Around the handling of an upload that was let in."""
        probes = self._full is not None
        self._probes -= probes
        try:
            yield
        finally:
            self._probes += probes and scope["state"].get("error_code") != _CODE


class ShedUploads:
    """ASGI middleware, inside of the guard, which has read the body: refuses an upload before it is decoded."""

    def __init__(self, app: ASGIApp, shedder: LoadShedder) -> None:
        self._app = app
        self._shedder = shedder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"], scope["path"]) != _UPLOAD:
            await self._app(scope, receive, send)
        elif full := self._shedder.refusal():
            await receive()  # the body need not be kept meanwhile
            await asyncio.sleep(DELAY_SECONDS)
            await no_room(_CODE, full).answer(scope)(scope, receive, send)
        else:
            with self._shedder.admission(scope):
                await self._app(scope, receive, send)
