"""The stream of events for those who watch."""

from contextlib import AbstractContextManager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ref_server.access.keys import Role
from ref_server.access.requirements import requires
from ref_server.http.asker import Asker
from ref_server.http.routes.documents import errors
from ref_server.http.watchers import Watcher, Watchers

_KIND = "text/event-stream"
_STREAM: dict[str, Any] = {
    "description": "events, until the client goes",
    "content": {_KIND: {"schema": {"type": "string"}}},
}
# Proxies must neither keep it nor gather it.
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


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
    async def events(asker: Asker, request: Request) -> Response:
        """Server-sent events: how things stand, then what changes, at most one of each a second.

        `event: queue` has the body of `GET /v1/queue`; `event: metrics` has `run`, `lineage`, `kind` and the latest
        `step` of a curve that has grown. What changes by waiting alone, such as ages, is no event. A comment comes
        after 15 seconds of silence. The stream ends when the server does; a client that comes again is told how
        things stand.

        ```
        curl --no-buffer localhost:8400/v1/events
        ```
        """
        state = request.state
        return EventStream(watchers.join(asker.run, state.holder, state.abort))
