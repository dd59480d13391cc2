"""Refuses requests of foreign pages, without a valid token, or with a wrong or too large body, before a route runs."""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ref_server.access.hosts import Hosts, is_loopback
from ref_server.access.keys import Denied, Principal, Role
from ref_server.access.requirements import ANY, JSON, UNDECLARED, Requirement, requirement_of
from ref_server.access.shares import Shares, peer
from ref_server.config import ServeConfig
from ref_server.http.bodies import Body, RefusedBodies, replay, too_large
from ref_server.http.errors import HttpError, busy, denied
from shared import wire
from shared.api import MAX_UPLOADS_BYTES

# Parsed JSON takes up to forty times its length in memory, and parsing blocks all other requests. 1 MiB holds ten
# thousand leases, or 131,072 token ids; a larger batch can be sent as safetensors.
MAX_JSON_BYTES = 2**20
# JSON bodies of one route at once. Routes share nothing: no other traffic keeps a trainer from extending its leases.
MAX_JSON_BODIES_BYTES = 16 * MAX_JSON_BYTES
# What a streamed body holds of the memory for bodies: what its route gathers for one write, and uvicorn's buffer.
STREAM_BYTES = 2 * 2**20
MAX_URL_BYTES = 8 * 1024
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024
# Headers that may occur only once: of two, a proxy could trust one and this server the other.
_ONCE = ("host", "origin", "authorization", "x-api-key", "content-type", "content-encoding", "content-length")
_OF_PROXIES = ("forwarded", "via", "x-forwarded-for", "x-real-ip")
# Routes of the Simple-GRPO protocol, whose clients send no token.
_LEGACY_PATHS = ("/upload", "/get")
_TINKER_PATHS = "/api/v1/"


class RouteTable:
    """The routes that an application had when the table was built, to be found before the router sees a request."""

    def __init__(self, routes: Iterable[Any]) -> None:
        self._routes = [(route, requirement_of(route)) for route in routes]

    def find(self, method: str, path: str) -> tuple[str, Requirement | None]:
        """The route's path as declared, and its requirement; of several that match, those with the greatest role.

        None for a path without such a method, and an empty path where there is no route. path: as the router sees it,
        percent-decoded.
        """
        looked_up = "GET" if method == "HEAD" else method
        at_path = [(route, required) for route, required in self._routes if route.path_regex.fullmatch(path)]
        fitting = [(route.path, required) for route, required in at_path if looked_up in route.methods]
        if fitting:
            return max(fitting, key=lambda each: each[1].role)
        return (at_path[0][0].path if at_path else ""), None


class Guard:
    """ASGI middleware, inside of `Requests`, which gives each request its id.

    It reads most bodies itself, so that no route waits for a slow client.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig, routes: RouteTable) -> None:
        self._app = app
        self._routes = routes
        self._config = config
        self._hosts = Hosts(config.host, config.allowed_hosts)
        self._max_body_bytes = config.max_body_mib * 2**20
        self._bodies = Shares(config.max_bodies_mib * 2**20)
        self._refused_bodies = RefusedBodies()
        self._json_bodies: dict[str, Shares] = defaultdict(lambda: Shares(MAX_JSON_BODIES_BYTES))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        body = Body(headers, receive, send, self._refused_bodies)
        try:
            await self._pass_on(scope, headers, body)
            return
        except HttpError as error:
            answer = error.answer(scope)
        except Denied as error:
            answer = denied(error).answer(scope)
        await answer(scope, body.receive, body.send)  # the exception is gone, and with it what was read of the body

    async def _pass_on(self, scope: Scope, headers: Headers, body: Body) -> None:
        """Calls the application. Raises what `_check` raises, and HttpError 408, 413, 429 for the body."""
        path, required = self._routes.find(scope["method"], scope["path"])
        scope["state"]["route"] = path
        self._check(scope, headers, required or UNDECLARED)
        if required is None:  # the router says that there is no such route
            await self._app(scope, replay(b"", body.receive), body.send)
            return
        shares, most = self._limits(path, required, media_type(headers))
        length = headers.get("content-length", "0")
        # int() raises for thousands of digits; twenty are more than any body needs.
        if not re.fullmatch("[0-9]{1,20}", length) or int(length) > most:
            raise too_large(most)
        with shares.hold(scope["state"]["holder"]) as take:
            if required.streamed:
                if not take(STREAM_BYTES):
                    raise busy("your uploads would fill more of the memory for bodies than is free")
                await self._app(scope, body.receive, body.send)
                return
            content = await body.read(take, most)
            if content is not None:
                receive, content = replay(content, body.receive), None  # so that only the route holds the body
                await self._app(scope, receive, body.send)

    def _check(self, scope: Scope, headers: Headers, required: Requirement) -> None:
        """Raises the first error in this order: 414, 431, 400, 404, 403 (host), 401 or 403 (token), 415."""
        _check_head(scope, headers)
        self._hosts.check(headers.get("host", ""), headers.get("origin"))
        scope["state"]["audited"] = required.audited
        self._admit(scope, headers, required)
        _check_media_type(headers, required.media_types)

    def _admit(self, scope: Scope, headers: Headers, required: Requirement) -> None:
        """Notes the caller, and who is charged for the request: the token, or the peer where none is required."""
        legacy = self._config.legacy_insecure and scope["path"] in _LEGACY_PATHS
        wanted = Role.OPEN if legacy and _comes_from_this_machine(scope, headers) else required.role
        open_to_all = not self._config.keys or wanted is Role.OPEN
        if open_to_all:
            principal = Principal(Role.OPEN, peer((scope.get("client") or ("",))[0]))
        else:
            principal = self._config.keys.principal(self._authorization(scope, headers))
        state = scope["state"]
        state["role"] = principal.role.name.lower() if principal.role else None
        state["caller"], state["holder"] = principal, principal.name
        if not open_to_all:
            principal.require(wanted)
        if principal.run is not None and not required.confines:
            raise Denied(
                f"this token is for run {principal.run!r} only, and this route is for all runs", "Authorization"
            )

    def _authorization(self, scope: Scope, headers: Headers) -> str | None:
        """The header with the token. Tinker's client has one of its own kind."""
        if self._config.tinker and scope["path"].startswith(_TINKER_PATHS) and (key := headers.get("x-api-key")):
            return f"Bearer {key}"
        return headers.get("authorization")

    def _limits(self, path: str, required: Requirement, kind: str) -> tuple[Shares, int]:
        """The memory that the body counts against, and its greatest length."""
        if required.streamed:
            return self._bodies, sys.maxsize
        if not required.media_types:
            return self._bodies, 0
        if kind == wire.UPLOADS_CONTENT_TYPE:
            return self._bodies, min(MAX_UPLOADS_BYTES, self._max_body_bytes)
        if kind == JSON and JSON in required.media_types:
            return self._json_bodies[path], min(MAX_JSON_BYTES, self._max_body_bytes)
        return self._bodies, self._max_body_bytes


def media_type(headers: Headers) -> str:
    """The Content-Type without its parameters, in lower case."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _check_head(scope: Scope, headers: Headers) -> None:
    if len(scope.get("raw_path", b"")) + len(scope.get("query_string", b"")) > MAX_URL_BYTES:
        raise HttpError(414, "too_large", f"the URL must be at most {MAX_URL_BYTES} bytes")
    if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADER_BYTES:
        limits = f"at most {MAX_HEADERS} headers and {MAX_HEADER_BYTES} bytes of them are read"
        raise HttpError(431, "too_large", limits)
    for name in _ONCE:
        if len(headers.getlist(name)) > 1:
            raise HttpError(400, "invalid_request", f"{name} must occur once", name)
    # The router's patterns accept a line break after a path; the guard's do not, and would require another role.
    if scope["path"].endswith("\n"):
        raise HttpError(404, "not_found", "Not Found")


def _check_media_type(headers: Headers, allowed: tuple[str, ...]) -> None:
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        message = f"a body must not be encoded, got {encoding[:80]!r}"
        raise HttpError(415, "unsupported_media_type", message, "Content-Encoding")
    if allowed and ANY not in allowed and media_type(headers) not in allowed:
        message = f"must be {' or '.join(allowed)}, got {media_type(headers)[:80]!r}"
        raise HttpError(415, "unsupported_media_type", message, "Content-Type")


def _comes_from_this_machine(scope: Scope, headers: Headers) -> bool:
    """False for a request that a proxy on this machine forwards: its client may be elsewhere."""
    return not any(name in headers for name in _OF_PROXIES) and is_loopback((scope.get("client") or ("",))[0])
