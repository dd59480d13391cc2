"""Refuses requests of foreign pages, without a valid token, or with a wrong or too large body."""

import re
from collections import defaultdict

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ref_server.access.hosts import Hosts, is_loopback
from ref_server.access.keys import Denied, Holder, Role
from ref_server.access.requirements import ANY, JSON, Reading, Requirement
from ref_server.access.shares import Shares, peer
from ref_server.config import ServeConfig
from ref_server.http.errors import Problem, denied
from ref_server.http.gate.bodies import Remains, too_large
from ref_server.http.gate.intakes import Intake, StreamedBody, UnreadBody, WholeBody
from ref_server.http.route_table import RouteTable

# Parsed JSON takes up to forty times its length in memory, and parsing blocks all other requests. 1 MiB holds ten
# thousand leases, or 131,072 token ids; a larger batch can be sent as safetensors.
MAX_JSON_BYTES = 2**20
# JSON bodies of one route at once. Routes share nothing: no other traffic keeps a trainer from extending its leases.
MAX_JSON_BODIES_BYTES = 16 * MAX_JSON_BYTES
MAX_URL_BYTES = 8 * 1024
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024
# Headers that may occur only once: of two, a proxy could trust one and this server the other.
_ONCE = ("host", "origin", "authorization", "content-type", "content-encoding", "content-length")
_OF_PROXIES = ("forwarded", "via", "x-forwarded-for", "x-real-ip")
# Routes of the Simple-GRPO protocol, whose clients send no token.
_LEGACY_PATHS = ("/upload", "/get")


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
        self._remains = Remains()
        self._json_bodies: dict[str, Shares] = defaultdict(lambda: Shares(MAX_JSON_BODIES_BYTES))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            await self._check(scope, headers)(self._app, scope, receive, send)
        # Answered outside of the block: the client may be slow to leave.
        except Problem as problem:
            await self._refuse(problem.answer(scope), scope, headers, receive, send)
        except Denied as error:
            await self._refuse(denied(error).answer(scope), scope, headers, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> Intake:
        """How the body is read.

        Raises the first error in this order: 414, 431, 400, 404, 403 (host), 401 or 403 (token), 415, 413.
        """
        _check_head(scope, headers)
        self._hosts.check(headers.get("host", ""), headers.get("origin"))
        route, required = self._routes.find(scope["method"], scope["path"])
        scope["state"]["audited"] = required.audited
        self._admit(scope, headers, required)
        _check_media_type(headers, required.media_types)
        intake = self._intake(route, required, media_type(headers))
        length = headers.get("content-length", "0")
        # int() raises for thousands of digits; twenty are more than any body needs.
        if intake.most is not None and (not re.fullmatch("[0-9]{1,20}", length) or int(length) > intake.most):
            raise too_large(intake.most)
        return intake

    def _admit(self, scope: Scope, headers: Headers, required: Requirement) -> None:
        """Notes the role, and who holds what the request takes: its token, or its peer where none is required."""
        legacy = self._config.legacy_insecure and scope["path"] in _LEGACY_PATHS
        wanted = Role.OPEN if legacy and _comes_from_this_machine(scope, headers) else required.role
        open_to_all = not self._config.keys or wanted is Role.OPEN
        if open_to_all:
            holder = Holder(Role.OPEN, peer((scope.get("client") or ("",))[0]))
        else:
            holder = self._config.keys.holder(headers.get("authorization"))
        state = scope["state"]
        state["role"] = holder.role.name.lower() if holder.role else None
        state["asker"], state["holder"] = holder, holder.name
        if not open_to_all:
            holder.require(wanted)
        if holder.run is not None and not required.confines:
            raise Denied(f"this token is for run {holder.run!r} alone, and this route is for all runs", "Authorization")

    def _intake(self, route: str, required: Requirement, kind: str) -> Intake:
        if not route:
            return UnreadBody()
        if required.reading is Reading.STREAMED:
            return StreamedBody(self._bodies, self._remains)
        if not required.media_types:
            return WholeBody(self._bodies, 0)
        if kind == JSON and JSON in required.media_types:
            return WholeBody(self._json_bodies[route], min(MAX_JSON_BYTES, self._max_body_bytes))
        return WholeBody(self._bodies, self._max_body_bytes)

    async def _refuse(self, answer: JSONResponse, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if "transfer-encoding" not in headers and headers.get("content-length", "0") == "0":
            await answer(scope, receive, send)
        else:
            await answer(scope, receive, self._remains.behind(receive, send))


def media_type(headers: Headers) -> str:
    """The Content-Type without its parameters, in lower case."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _check_head(scope: Scope, headers: Headers) -> None:
    if len(scope.get("raw_path", b"")) + len(scope.get("query_string", b"")) > MAX_URL_BYTES:
        raise Problem(414, "too_large", f"the URL must be at most {MAX_URL_BYTES} bytes")
    if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADER_BYTES:
        limits = f"at most {MAX_HEADERS} headers and {MAX_HEADER_BYTES} bytes of them are read"
        raise Problem(431, "too_large", limits)
    for name in _ONCE:
        if len(headers.getlist(name)) > 1:
            raise Problem(400, "invalid_request", f"{name} must occur once", name)
    # The router's patterns accept a line break after a path; the guard's do not, and would require another role.
    if scope["path"].endswith("\n"):
        raise Problem(404, "not_found", "Not Found")


def _check_media_type(headers: Headers, allowed: tuple[str, ...]) -> None:
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        message = f"a body must not be encoded, got {encoding[:80]!r}"
        raise Problem(415, "unsupported_media_type", message, "Content-Encoding")
    if allowed and ANY not in allowed and media_type(headers) not in allowed:
        message = f"must be {' or '.join(allowed)}, got {media_type(headers)[:80]!r}"
        raise Problem(415, "unsupported_media_type", message, "Content-Type")


def _comes_from_this_machine(scope: Scope, headers: Headers) -> bool:
    """False for a request that a proxy on this machine forwards: it may come from elsewhere."""
    return not any(name in headers for name in _OF_PROXIES) and is_loopback((scope.get("client") or ("",))[0])
