"""Sheds load: refuses most uploads of a run, before they are decoded, while its share of the queue is used up."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from ref_server.http.bodies import replay
from ref_server.http.errors import DELAY_SECONDS, no_room
from ref_server.queue.errors import NoRoom
from shared import wire

# While a run's share is used up, this many uploads a second probe whether it still is, and this many at the same time.
PROBES_PER_SECOND = 32.0
MAX_PROBES = 16.0
# All uploads are let in again this long after the last one that found no room.
MEMORY_SECONDS = 5.0
# Runs whose fullness is remembered: clients name the runs.
MAX_RUNS = 1000


@dataclass
class _FullRun:
    """reason, retry_after: of the last refusal by the queue. probes: how many uploads are let in now.

    counted_at: when the probes were counted.
    """

    reason: str
    retry_after: float
    full_at: float
    counted_at: float
    probes: float = MAX_PROBES


class LoadShedder:
    """Remembers for a moment for which runs the queue had no room. Used on the event loop.

    The queue finds out that it is full only after an upload was decoded and hashed. Under overload, refused uploads
    would use up the time that accepted ones need. So while there is no room for a run, only a few uploads of it are let
    in as probes, and all others are refused. A probe that the queue does not refuse is not counted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full: dict[str, _FullRun] = {}

    def __bool__(self) -> bool:
        """Whether any run was full lately."""
        return bool(self._full)

    def refusal(self, run: str | None) -> NoRoom | None:
        """Why an upload of the run is refused now; None lets it in."""
        full = self._full.get(run or "")
        if full is None:
            return None
        now = self._clock()
        if now - full.full_at > MEMORY_SECONDS:
            del self._full[run or ""]
            return None
        full.probes = min(MAX_PROBES, full.probes + (now - full.counted_at) * PROBES_PER_SECOND)
        full.counted_at = now
        return NoRoom(full.reason, run or "", full.retry_after) if full.probes < 1 else None

    @contextmanager
    def admission(self, run: str | None) -> Iterator[None]:
        """Around the handling of an upload that was let in. Notes a NoRoom, and raises it again."""
        probed, refused = self._full.get(run or ""), False
        if probed:
            probed.probes -= 1
        try:
            yield
        except NoRoom as error:
            refused = True
            self._note(error)
            raise
        finally:
            if probed and not refused:
                probed.probes += 1

    def _note(self, error: NoRoom) -> None:
        now = self._clock()
        full = self._full.pop(error.run, None) or _FullRun("", 0.0, now, now)
        full.reason, full.retry_after, full.full_at = str(error), error.retry_after, now
        self._full[error.run] = full  # the newest is the last
        if len(self._full) > MAX_RUNS:
            del self._full[next(iter(self._full))]


class ShedUploads:
    """ASGI middleware, inside of the guard, which has read the body: refuses an upload before a route costs time.

    The state of an upload gets `upload_run`, for `LoadShedder.admission`.
    """

    def __init__(self, app: ASGIApp, shedder: LoadShedder) -> None:
        self._app = app
        self._shedder = shedder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"], scope["path"]) != ("POST", "/v1/batches") or not self._shedder:
            await self._app(scope, receive, send)
            return
        body = (await receive())["body"]
        run = scope["state"]["upload_run"] = wire.run_of(body)
        if full := self._shedder.refusal(run):
            del body  # it need not be kept meanwhile
            await asyncio.sleep(DELAY_SECONDS)
            await no_room("queue_full", full).answer(scope)(scope, receive, send)
            return
        receive, body = replay(body, receive), b""
        await self._app(scope, receive, send)
