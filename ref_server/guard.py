"""What is refused before a route sees it: foreign web pages, unexpected bodies, bodies that are too large."""

import re
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ref_server.config import is_loopback
from ref_server.problem import Problem
from shared.wire import CONTENT_TYPE

_JSON = "application/json"
# What the body of each route may be.
CONTENT_TYPES: dict[str, tuple[str, ...]] = {
    "/v1/batches": (CONTENT_TYPE,),
    "/v1/logprobs": (_JSON, CONTENT_TYPE),
    "/v1/batches/lease": (_JSON,),
    "/v1/leases/ack": (_JSON,),
    "/v1/leases/extend": (_JSON,),
    "/v1/leases/release": (_JSON,),
}


class BodyTooLarge(HTTPException):
    """Raised while a body of unknown length is read; an HTTPException, since FastAPI lets those through."""

    def __init__(self, limit: int) -> None:
        super().__init__(413, f"the body is larger than {limit} bytes")


class Guard:
    """ASGI middleware. Gives every request an id, which errors, logs and the `X-Request-Id` header carry.

    host: the address listened on. Behind loopback only loopback names are expected in `Host`, so that a web page whose
    name was made to resolve to 127.0.0.1 cannot drive the server.
    """

    def __init__(self, app: ASGIApp, *, host: str, max_body_bytes: int) -> None:
        self._app = app
        self._local_only = is_loopback(host)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not (0 < len(request_id) <= 100 and request_id.isascii() and request_id.isprintable()):
            request_id = uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._check(scope, headers)
        except Problem as problem:
            response = JSONResponse(problem.body(request_id), problem.status, headers=problem.headers)
            await response(scope, receive, send_with_id)
            return
        await self._app(scope, self._bounded(receive), send_with_id)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """403, then 415, then 413."""
        host = headers.get("host", "").lower()
        if self._local_only and not is_loopback(_host_name(host)):
            raise Problem(403, "forbidden", f"Host {host!r} is not this server; use 127.0.0.1 or localhost", "Host")
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != host:
            raise Problem(403, "forbidden", f"a page of {origin} may not use this server", "Origin")
        allowed = CONTENT_TYPES.get(scope["path"])
        if allowed and scope["method"] in ("POST", "PUT"):
            given = media_type(headers)
            if given not in allowed:
                raise Problem(
                    415, "unsupported_media_type", f"must be {' or '.join(allowed)}, got {given!r}", "Content-Type"
                )
        length = headers.get("content-length", "0")
        # Twenty digits are more than any body has, and int() would refuse some thousand.
        if not re.fullmatch("[0-9]{1,20}", length) or int(length) > self._max_body_bytes:
            raise Problem(413, "too_large", f"must be at most {self._max_body_bytes} bytes, got {length}", "body")

    def _bounded(self, receive: Receive) -> Receive:
        seen = 0

        async def bounded() -> Message:
            nonlocal seen
            message: Any = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body_bytes:
                raise BodyTooLarge(self._max_body_bytes)
            return message

        return bounded


def media_type(headers: Headers) -> str:
    """What the body is said to be, without parameters, in lower case."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _host_name(host: str) -> str:
    """The name in a `Host` header, without its port; IPv6 addresses stand in brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
