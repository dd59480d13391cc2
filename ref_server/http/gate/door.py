"""Where uploads come in, and where most of them are sent away while the queue is full."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from ref_server.http.problem import no_room
from ref_server.queue.interface import NoRoom

# While the queue is full, so many uploads a second find out whether it still is, and so many at the same time.
SCOUTS_PER_SECOND = 32.0
MAX_SCOUTS = 16.0
# So long after the last upload that found no room, all are let in again.
MEMORY_SECONDS = 5.0
# Who is sent away hears of it so late, since not everyone heeds Retry-After.
DELAY_SECONDS = 1.0
_UPLOAD = ("POST", "/v1/batches")
_CODE = "queue_full"


class Door:
    """Remembers for a moment that the queue was full. Used on the event loop, but for `note`.

    To find that out, an upload is decoded, hashed, and taken to the store: under many times the load that the server
    can take, those that are refused would use up what those that are taken need. So while there is no room, only a few
    scouts are let in, and all others are refused. Scouts that return without having met a full queue go again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full: NoRoom | None = None
        self._full_at = self._counted_at = clock()
        self._scouts = MAX_SCOUTS

    def note(self, full: NoRoom) -> None:
        """An upload has found no room. From any thread."""
        self._full, self._full_at = full, self._clock()

    def refusal(self) -> NoRoom | None:
        """Why there was no room lately, when there are scouts enough; None lets an upload in."""
        now = self._clock()
        if now - self._full_at > MEMORY_SECONDS:
            self._full = None
        self._scouts = min(MAX_SCOUTS, self._scouts + (now - self._counted_at) * SCOUTS_PER_SECOND)
        self._counted_at = now
        return self._full if self._scouts < 1 else None

    @contextmanager
    def admission(self, scope: Scope) -> Iterator[None]:
        """Around the handling of an upload that was let in."""
        scouts = self._full is not None
        self._scouts -= scouts
        try:
            yield
        finally:
            self._scouts += scouts and scope["state"].get("error_code") != _CODE


class Entrance:
    """ASGI middleware, inside of the guard, which has read the body: asks the door before an upload is looked at."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"], scope["path"]) != _UPLOAD:
            await self._app(scope, receive, send)
        elif full := self._door.refusal():
            await receive()  # the body need not be kept meanwhile
            await asyncio.sleep(DELAY_SECONDS)
            await no_room(_CODE, full).answer(scope)(scope, receive, send)
        else:
            with self._door.admission(scope):
                await self._app(scope, receive, send)
