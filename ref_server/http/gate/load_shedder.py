"""Sheds load: refuses most uploads of a run early while its share of the queue is used up."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from starlette.types import ASGIApp, Receive, Scope, Send

from ref_server.http.errors import DELAY_SECONDS, no_room
from ref_server.http.gate.bodies import replay
from ref_server.queue.errors import NoRoom
from shared import wire

# While the queue is full, this many uploads a second probe whether it still is, and this many at the same time.
PROBES_PER_SECOND = 32.0
MAX_PROBES = 16.0
# All uploads are let in again this long after the last one that found no room.
MEMORY_SECONDS = 5.0
# Runs whose fullness is remembered.
MAX_RUNS = 1000
_UPLOAD = ("POST", "/v1/batches")
_CODE = "queue_full"


class LoadShedder:
    """Remembers for a moment that the queue was full for a run. Used on the event loop, except `note`.

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


class LoadShedders:
    """One LoadShedder for each run that found no room lately. Clients name the runs, so only so many are remembered."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of_run: dict[str, LoadShedder] = {}

    def __bool__(self) -> bool:
        return bool(self._of_run)

    def note(self, full: NoRoom) -> None:
        shedder = self._of_run.pop(full.run, None) or LoadShedder(self._clock)
        shedder.note(full)
        self._of_run[full.run] = shedder  # the newest is the last
        if len(self._of_run) > MAX_RUNS:
            del self._of_run[next(iter(self._of_run))]

    def of(self, run: str | None) -> LoadShedder | None:
        return None if run is None else self._of_run.get(run)


class ShedUploads:
    """ASGI middleware, inside of the guard, which has read the body: refuses an upload before it is decoded."""

    def __init__(self, app: ASGIApp, shedders: LoadShedders) -> None:
        self._app = app
        self._shedders = shedders

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"], scope["path"]) != _UPLOAD or not self._shedders:
            await self._app(scope, receive, send)
            return
        body = (await receive())["body"]
        shedder = self._shedders.of(wire.run_of(body))
        if shedder and (full := shedder.refusal()):
            del body  # it need not be kept meanwhile
            await asyncio.sleep(DELAY_SECONDS)
            await no_room(_CODE, full).answer(scope)(scope, receive, send)
            return
        receive, body = replay(body, receive), b""
        with shedder.admission(scope) if shedder else nullcontext():
            await self._app(scope, receive, send)
