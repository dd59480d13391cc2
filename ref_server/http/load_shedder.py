"""Sheds load: refuses most uploads of a run, before they are decoded, while its share of the queue is used up."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from ref_server.http.bodies import replay
from ref_server.http.errors import DELAY_SECONDS, no_room
from ref_server.queue.errors import NoRoom
from shared import wire

# While a run's share is used up, this many of its uploads at a time probe whether it still is. One that is refused
# counts for PROBE_SECONDS, so that at most 32 a second are decoded in vain.
MAX_PROBES = 16
PROBE_SECONDS = 0.5
# All uploads are let in again this long after the last one that found no room.
MEMORY_SECONDS = 5.0
# Runs whose fullness is remembered: clients name the runs.
MAX_RUNS = 1000


@dataclass
class _FullRun:
    """reason, retry_after: of the queue's last refusal. forgotten_at: by the loop's clock. probes: that count now."""

    reason: str = ""
    retry_after: float = 0.0
    forgotten_at: float = 0.0
    probes: int = 0

    def end_probe(self) -> None:
        self.probes -= 1


class LoadShedder:
    """Remembers for a moment for which runs the queue had no room. Used on the event loop.

    The queue finds out that it is full only after an upload was decoded and hashed. Under overload, refused uploads
    would use up the time that accepted ones need. So while there is no room for a run, only a few uploads of it are let
    in as probes, and all others are refused.
    """

    def __init__(self) -> None:
        self._full: dict[str, _FullRun] = {}

    def __bool__(self) -> bool:
        """Whether any run was full lately."""
        return bool(self._full)

    def refusal(self, run: str | None) -> NoRoom | None:
        """Why an upload of the run is refused now; None lets it in."""
        full = self._full.get(run or "")
        if full and asyncio.get_running_loop().time() > full.forgotten_at:
            del self._full[run or ""]
        elif full and full.probes >= MAX_PROBES:
            return NoRoom(full.reason, run or "", full.retry_after)
        return None

    @contextmanager
    def admission(self, run: str | None) -> Iterator[None]:
        """Around the handling of an upload that was let in. Notes a NoRoom, and raises it again."""
        loop = asyncio.get_running_loop()
        full, still_counts = self._full.get(run or ""), 0.0
        if full:
            full.probes += 1
        try:
            yield
        except NoRoom as error:
            still_counts = PROBE_SECONDS
            self._note(error, loop.time())
            raise
        finally:
            if full:
                loop.call_later(still_counts, full.end_probe)

    def _note(self, error: NoRoom, now: float) -> None:
        full = self._full.pop(error.run, None) or _FullRun()
        full.reason, full.retry_after, full.forgotten_at = str(error), error.retry_after, now + MEMORY_SECONDS
        self._full[error.run] = full  # the newest is the last
        if len(self._full) > MAX_RUNS:
            del self._full[next(iter(self._full))]


class ShedUploads:
    """ASGI middleware, inside of the guard, which has read the body: refuses an upload before the router and a route
    cost time. `python -m tests.load overload` shows the difference.

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
