"""Refuses requests of foreign pages, without a valid token, or with a wrong or too large body."""

import re

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ref_server.access.hosts import Hosts, is_loopback
from ref_server.access.keys import Denied, Role
from ref_server.access.requirements import JSON
from ref_server.config import ServeConfig
from ref_server.http.gate.bodies import Budget, Held, discard, read_body, replay, too_large
from ref_server.http.problem import Problem, denied
from ref_server.http.route_table import RouteTable

# Parsed JSON takes up to forty times its length in memory, and parsing blocks all other requests. 1 MiB holds ten
# thousand leases, or 131,072 token ids; a larger batch can be sent as safetensors.
MAX_JSON_BYTES = 2**20
# JSON bodies have a budget of their own, so that many uploads cannot keep a trainer from extending its leases.
MAX_JSON_BODIES_BYTES = 64 * MAX_JSON_BYTES
MAX_URL_BYTES = 8 * 1024
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024
# Headers that may occur only once: of two, a proxy could trust one and this server the other.
_ONCE = ("host", "origin", "authorization", "content-type", "content-encoding", "content-length")
# Routes of the Simple-GRPO protocol, whose clients send no token.
_LEGACY_PATHS = ("/upload", "/get")


class Guard:
    """ASGI middleware, inside of `Requests`, which gives each request its id.

    It reads the whole body itself, so that no route waits for a slow client.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig, routes: RouteTable) -> None:
        self._app = app
        self._routes = routes
        self._config = config
        self._hosts = Hosts(config.host, config.allowed_hosts)
        self._max_body_bytes = config.max_body_mib * 2**20
        self._budget = Budget(config.max_bodies_mib * 2**20)
        self._json_budget = Budget(MAX_JSON_BODIES_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        budget = self._json_budget if media_type(headers) == JSON else self._budget
        with budget.hold() as held:
            result = await self._read(scope, headers, receive, held)
            if isinstance(result, bytes):
                receive, result = replay(result, receive), None  # so that only the route holds the body
                await self._app(scope, receive, send)
        if result is not None:  # outside of the budget: the client may be slow to leave
            await _refuse(result, scope, headers, receive, send)

    async def _read(self, scope: Scope, headers: Headers, receive: Receive, held: Held) -> bytes | JSONResponse | None:
        """The whole body, or the answer that refuses the request; None when the client went away."""
        try:
            self._check(scope, headers)
            return await read_body(receive, held, self._most_bytes(headers))
        except Problem as problem:
            return problem.answer(scope)
        except Denied as error:
            return denied(error).answer(scope)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raises the first error in this order: 414, 431, 400, 404, 403 (host), 401 or 403 (token), 415, 413."""
        _check_head(scope, headers)
        self._hosts.check(headers.get("host", ""), headers.get("origin"))
        role = self._config.keys.admit(headers.get("authorization"), self._role_wanted(scope, headers))
        scope["state"]["role"] = role and role.name.lower()
        _check_media_type(scope, headers, self._routes.media_types(scope["path"]))
        length = headers.get("content-length", "0")
        # int() raises for thousands of digits; twenty are more than any body needs.
        if not re.fullmatch("[0-9]{1,20}", length) or int(length) > self._most_bytes(headers):
            raise too_large(self._most_bytes(headers))

    def _role_wanted(self, scope: Scope, headers: Headers) -> Role:
        legacy = self._config.legacy_insecure and scope["path"] in _LEGACY_PATHS
        if legacy and _comes_from_this_machine(scope, headers):
            return Role.OPEN
        return self._routes.role(scope["method"], scope["path"])

    def _most_bytes(self, headers: Headers) -> int:
        if media_type(headers) == JSON:
            return min(MAX_JSON_BYTES, self._max_body_bytes)
        return self._max_body_bytes


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


def _check_media_type(scope: Scope, headers: Headers, allowed: tuple[str, ...]) -> None:
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        message = f"a body must not be encoded, got {encoding[:80]!r}"
        raise Problem(415, "unsupported_media_type", message, "Content-Encoding")
    if allowed and scope["method"] in ("POST", "PUT") and media_type(headers) not in allowed:
        message = f"must be {' or '.join(allowed)}, got {media_type(headers)[:80]!r}"
        raise Problem(415, "unsupported_media_type", message, "Content-Type")


def _comes_from_this_machine(scope: Scope, headers: Headers) -> bool:
    """False for a request that a proxy on this machine forwards: it may come from elsewhere."""
    proxied = "forwarded" in headers or "x-forwarded-for" in headers
    return not proxied and is_loopback((scope.get("client") or ("",))[0])


async def _refuse(answer: JSONResponse, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
    if "transfer-encoding" not in headers and headers.get("content-length", "0") == "0":
        await answer(scope, receive, send)
        return
    answer.headers["Connection"] = "close"  # the next request begins behind a body that was not read
    await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": True})
    await discard(receive)
    await send({"type": "http.response.body", "body": b""})
