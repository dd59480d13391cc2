"""Gives every request an id, counts and logs it; says whose token it has, for routes that confine a token to a run."""

import time
from collections.abc import Iterable
from typing import Annotated
from uuid import uuid4

import structlog
from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ref_server.access.keys import Principal
from ref_server.metrics import Traffic, known_method
from ref_server.queue.queue import Queue

log = structlog.get_logger()

# nginx's status for a client that went away before it was answered.
CLIENT_CLOSED = 499
# Errors that a healthy client gets, too: an id that is gone, a batch uploaded twice, a full queue.
_USUAL = (404, 409, 429)


class Requests:
    """ASGI middleware around all others, so that it also sees requests which they refuse.

    A request keeps the client's id if that is printable, else it gets a new one. Errors, the `X-Request-Id` header
    and all log lines carry it. The line of a request names its route, and the batch or the run that a route notes. It
    never has the path, the query, the body or headers, since a client can write anything there; only that of an audited
    request has its path's parameters.
    """

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self._app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope.setdefault("state", {})["request_id"] = _request_id(scope)
        # Each request runs in its own task, so this binds the id for no other request.
        structlog.contextvars.bind_contextvars(request_id=request_id)
        seen = _Observed(receive, send, request_id)
        self._traffic.active.inc()
        try:
            await self._app(scope, seen.receive, seen.send)
        except Exception:
            seen.status, scope["state"]["error_code"] = 500, "internal"  # Starlette answers outside of this middleware
            raise
        finally:
            self._traffic.active.dec()
            self._record(scope, seen)

    def _record(self, scope: Scope, seen: "_Observed") -> None:
        streamed = scope["state"].get("stream", False)  # it is open for hours: only how soon it began is a latency
        open_seconds = time.perf_counter() - seen.began
        seconds = seen.answered - seen.began if streamed else open_seconds
        state, client = scope["state"], scope.get("client")
        route, code = state.get("route") or "unmatched", state.get("error_code")
        self._traffic.add(route, scope["method"], seen.status, code, seconds)
        role, audited = state.get("role"), state.get("audited", False)
        about = (scope.get("path_params", {}) if audited else {}) | state.get("about", {})
        details = {"code": code, "role": role, "name": role and state["holder"], "peer": client and client[0], **about}
        if streamed:
            details["open_seconds"] = round(open_seconds, 1)
        loud = audited or _is_unusual(seen.status)
        failed = seen.status >= 500 and code != "not_ready"  # a server that drains says so to each who asks
        write = log.error if failed else log.info if loud else log.debug
        write(
            "audit" if audited else "request",
            method=known_method(scope["method"]),
            route=route,
            status=seen.status,
            ms=round(1000 * seconds, 1),
            bytes_in=seen.bytes_in,
            **{name: value for name, value in details.items() if value is not None},
        )


class _Observed:
    """Wraps `receive` and `send` of one request: counts bytes in, notes the status, adds the header."""

    def __init__(self, receive: Receive, send: Send, request_id: str) -> None:
        self._receive = receive
        self._send = send
        self._header = (b"x-request-id", request_id.encode())
        self.began = self.answered = time.perf_counter()
        self.status = CLIENT_CLOSED
        self.bytes_in = 0

    async def receive(self) -> Message:
        message = await self._receive()
        self.bytes_in += len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.answered = message["status"], time.perf_counter()
            message["headers"] = [*message["headers"], self._header]
        await self._send(message)


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if 0 < len(given) <= 100 and given.isascii() and given.isprintable() else uuid4().hex


def _is_unusual(status: int) -> bool:
    return status >= 400 and status not in _USUAL


async def _caller(request: Request) -> Principal:
    return request.state.caller  # the guard has set it


Caller = Annotated[Principal, Depends(_caller)]


def confine(caller: Principal, queue: Queue, ids: Iterable[str]) -> None:
    """Raises Denied if a batch belongs to another run than the caller's token is for. Unknown ids belong to no run."""
    if caller.run is not None:
        for run in queue.runs_of(list(ids)):
            caller.only(run)


def note(request: Request, **about: str | int | None) -> None:
    """Adds to the request's line in the log. Give checked values only."""
    request.state.about = about
