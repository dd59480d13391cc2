"""Server-sent events: clients that watch the server.

One producer looks once a second, while anybody watches, and sends all of them what has changed. Of the events that a
client has not read yet only the newest of each queue and curve is kept, so a slow client holds little memory.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import structlog
from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ref_server.access.keys import Role
from ref_server.access.requirements import requires
from ref_server.access.shares import Shares
from ref_server.background import BackgroundLoop
from ref_server.http.requests import Caller
from ref_server.http.routes.documents import errors
from ref_server.http.shared_call import QueueStats
from ref_server.queue.errors import StorageBroken, StorageFull
from ref_server.queue.run_metrics import Curve
from ref_server.scoring.reference import Busy
from ref_server.service.service import Service
from ref_server.service.views import RunSelection
from shared.api import Kind, MetricsEvent, QueueView

log = structlog.get_logger()

# Clients that watch at once; one client may open as many streams as are free.
MOST = 128
EVERY_SECONDS = 1.0
# A comment after so much silence, so that proxies keep the connection and a client that is gone is noticed.
COMMENT_SECONDS = 15.0
# Runs of one queue event.
_RUNS = 1000
# At the end of the server a watcher that does not read is cut off after this time.
_END_SECONDS = 0.5
_KIND = "text/event-stream"
_STREAM: dict[str, Any] = {
    "description": "events, until the client goes",
    "content": {_KIND: {"schema": {"type": "string"}}},
}
# Proxies must neither keep it nor gather it.
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@dataclass(frozen=True)
class _News:
    """run: the only one that it is about; None: all. of_all: clients that may see all runs get it, too.

    mark: it is new when this differs.
    """

    run: str | None
    of_all: bool
    mark: Any
    event: bytes

    def concerns(self, watcher: "Watcher") -> bool:
        return watcher.run == self.run or (self.of_all and watcher.run is None)


class Watcher:
    """run: the only one that the client may see; None: all. abort: closes its connection."""

    def __init__(self, run: str | None, abort: Callable[[], None]) -> None:
        self.run = run
        self.abort = abort
        self._unread: dict[Hashable, bytes] = {}
        self._bell = asyncio.Event()
        self._ended = False

    def tell(self, key: Hashable, event: bytes) -> None:
        self._unread[key] = event
        self._bell.set()

    def end(self) -> None:
        self._ended = True
        self._bell.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Events, and comments where there are none for long, until the server ends."""
        while not self._ended:
            try:
                async with asyncio.timeout(COMMENT_SECONDS):
                    await self._bell.wait()
            except TimeoutError:
                yield b":\n\n"
                continue
            self._bell.clear()
            events = b"".join(self._unread.values())
            self._unread.clear()
            if events:
                yield events


class Watchers:
    """Used on the event loop, except `end`."""

    def __init__(self, service: Service, stats: QueueStats) -> None:
        self._service = service
        self._stats = stats
        self._background = BackgroundLoop("polling for events")
        service.loops.append(self._background)
        self._shares = Shares(MOST)
        self._watchers: set[Watcher] = set()
        self._known: dict[Hashable, _News] = {}
        self._producer: asyncio.Task[None] | None = None
        self._thread = CapacityLimiter(1)
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def join(self, run: str | None, holder: str, abort: Callable[[], None]) -> Iterator[Watcher]:
        """A watcher; it first receives the current state. holder: the client. Raises Busy, NotReady."""
        self._service.check_open()
        if not self._shares.take(holder):
            raise Busy(f"too many streams of events are open for {holder} already: close one")
        watcher = Watcher(run, abort)
        self._watchers.add(watcher)
        self._tell({watcher}, self._known)
        if self._producer is None or self._producer.done():
            self._loop = asyncio.get_running_loop()
            self._producer = asyncio.create_task(self._produce())
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            self._shares.give(holder)
            if not self._watchers:
                self._stop()

    def end(self) -> None:
        """Ends all streams. Any thread may call it."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        left = [*self._watchers]
        for watcher in left:
            watcher.end()
            asyncio.get_running_loop().call_later(_END_SECONDS, self._cut_off, watcher)

    def _cut_off(self, watcher: Watcher) -> None:
        if watcher in self._watchers:
            watcher.abort()

    def _stop(self) -> None:
        if self._producer is not None:
            self._producer.cancel()
        self._producer = None
        self._known = {}
        self._background.reset()

    async def _produce(self) -> None:
        while True:
            with self._background.turn():
                try:
                    self._spread(await self._look())
                except (StorageBroken, StorageFull) as error:
                    log.debug("no events are sent to watchers", error=str(error))
            await asyncio.sleep(EVERY_SECONDS + self._background.pause)

    async def _look(self) -> dict[Hashable, _News]:
        stats = await self._stats.now()
        curves = await to_thread.run_sync(self._service.queue.curves, limiter=self._thread)
        news: dict[Hashable, _News] = {}
        for run in {watcher.run for watcher in self._watchers}:
            view = self._service.describe_queue(stats, RunSelection(_RUNS, None, run, confined=run is not None))
            news["queue", run] = _News(run, False, _settled(view), _event("queue", view.model_dump_json()))
        for curve in (each for each in reversed(curves) if each.kind in {*Kind}):
            news[curve.key] = _news_of(curve)
        return news

    def _spread(self, news_now: dict[Hashable, _News]) -> None:
        before, self._known = self._known, news_now
        changed = {key: news for key, news in news_now.items() if key not in before or before[key].mark != news.mark}
        self._tell(self._watchers, changed)

    @staticmethod
    def _tell(watchers: Iterable[Watcher], all_news: Mapping[Hashable, _News]) -> None:
        for watcher in watchers:
            for key, news in all_news.items():
                if news.concerns(watcher):
                    watcher.tell(key, news.event)


def _settled(view: QueueView) -> QueueView:
    """Without what changes merely because time passes."""
    scoring = view.scoring.model_copy(update={"waiting_seconds": 0.0})
    return view.model_copy(update={"oldest_age_seconds": None, "scoring": scoring})


def _news_of(curve: Curve) -> _News:
    grown = MetricsEvent(run=curve.run, lineage=curve.lineage, kind=Kind(curve.kind), step=curve.step)
    return _News(curve.run, True, (curve.updated_at, curve.step), _event("metrics", grown.model_dump_json()))


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()


class EventStream(StreamingResponse):
    """joined: entered while the stream is open."""

    def __init__(self, joined: AbstractContextManager[Watcher]) -> None:
        super().__init__(iter(()), media_type=_KIND, headers=_HEADERS)
        self._joined = joined

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._joined as watcher:
            scope["state"]["stream"] = True
            self.body_iterator = watcher.pieces()
            await super().__call__(scope, receive, send)


def add(app: FastAPI, watchers: Watchers) -> None:
    @app.get("/v1/events", response_class=Response, responses={200: _STREAM, **errors(503)})
    @requires(Role.TRAIN, confines=True)
    async def events(caller: Caller, request: Request) -> Response:
        """Server-sent events: the current state, then what changes, at most one of each a second.

        `event: queue` has the body of `GET /v1/queue`; `event: metrics` has `run`, `lineage`, `kind` and the latest
        `step` of a curve that has grown. What changes merely because time passes, such as ages, is no event.
        A comment comes after 15 seconds of silence. The stream ends when the server does; a client that reconnects
        gets the current state.

        ```
        curl --no-buffer localhost:8400/v1/events
        ```
        """
        state = request.state
        return EventStream(watchers.join(caller.run, state.holder, state.abort))
