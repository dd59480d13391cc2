"""The base of both clients: everything but sending. URL, credentials, retries, reading responses."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import httpx
import tenacity

from shared.client.credentials import check_token, trust
from shared.client.errors import ClientError, NotRefServer, RefServerError, Unreachable, refusal, unreachable
from shared.client.requests import JSON_BYTES, Request
from shared.client.transfers import append

# Called before each retry with the reason and the seconds waited so far. May raise to give up.
OnWait = Callable[[str, float], None]

T = TypeVar("T")

_CONNECT_SECONDS = 5.0
_BACKOFF = tenacity.wait_random_exponential(multiplier=0.1, max=2.0)
# Never reached through a proxy from the environment: a proxy on another machine would look for the server there, and
# would see the token.
THIS_MACHINE: tuple[str, ...] = ("all://localhost", "all://127.0.0.1", "all://[::1]")


class Connection:
    """Base class of the clients. Subclasses send the requests."""

    def __init__(
        self, url: str, *, token: str | None, ca: str | Path | None, patience: float | None, on_wait: OnWait, hint: str
    ) -> None:
        self.url = url
        self._patience = patience
        self._on_wait = on_wait
        self._hint = hint
        self._options: dict[str, Any] = {
            "base_url": url,
            # Uncompressed: a few KiB that expand to gigabytes would pass every limit.
            "headers": {"Accept-Encoding": "identity", **_authorization(token)},
            "verify": True if ca is None else trust(Path(ca)),
            "mounts": dict.fromkeys(THIS_MACHINE),
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def retrying(self, request: Request[Any]) -> dict[str, Any]:
        """Arguments of tenacity's `Retrying` and `AsyncRetrying`: retry while waiting may help and patience lasts."""
        arrived = (lambda sink=request.sink: sink.size) if request.sink else lambda: 0
        policy = RetryPolicy(self.url, request.repeatable, self._patience, self._on_wait, self._hint, arrived)
        return {"retry": tenacity.retry_if_exception(policy.retries), "wait": policy.seconds, "reraise": True}

    def arguments(self, request: Request[Any]) -> dict[str, Any]:
        """Arguments of httpx's `request`."""
        return {
            "method": request.method,
            "url": request.path,
            "params": dict(request.params),
            "content": request.content if request.source is None else self._stream(request.source),
            "headers": self._headers(request),
            "timeout": httpx.Timeout(request.read_seconds, connect=min(request.read_seconds, _CONNECT_SECONDS)),
        }

    def _stream(self, source: Path) -> Any:
        """The bytes of a file as httpx wants them."""
        raise NotImplementedError

    def _headers(self, request: Request[Any]) -> dict[str, str]:
        kind = {"Content-Type": request.content_type} if request.content_type else {}
        return {**kind, **request.headers, **(request.sink.headers if request.sink else {})}

    @contextmanager
    def translating(self) -> Iterator[None]:
        """Turns httpx's connection errors into Unreachable."""
        try:
            yield
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise unreachable(error, self.url) from None

    def check_encoding(self, response: httpx.Response) -> None:
        """Raises NotRefServer for a compressed response, unless it is an error of some gateway."""
        encoding = response.headers.get("Content-Encoding", "identity")
        if response.is_success and encoding != "identity":
            words = f"its answer is compressed ({encoding}), which was not requested"
            raise NotRefServer(f"the server at {self.url} is not a reference server: {words}")

    def collect(self, request: Request[Any], response: httpx.Response, body: bytearray, piece: bytes) -> None:
        """Adds a piece to the body of a response. Raises NotRefServer for one that is longer than any legal one."""
        try:
            append(body, piece, request.most if response.is_success else JSON_BYTES)
        except ValueError as error:
            words = f"{error} ({request.method} {request.path})"
            raise NotRefServer(f"the server at {self.url} is not a reference server: {words}") from None

    def read(self, request: Request[T], response: httpx.Response) -> T:
        """Parses a response. Raises RefServerError, NotRefServer."""
        if not response.is_success:
            raise refusal(response, self.url)
        try:
            return request.read(response)
        except (ValueError, LookupError) as error:
            words = f"the server at {self.url} is not a reference server of this version: {_first_line(error)}"
            raise NotRefServer(words) from None


def whole(response: httpx.Response, body: bytes | bytearray) -> httpx.Response:
    """A streamed response with the body that was read from it; without it if that is compressed."""
    headers = response.headers.copy()
    compressed = headers.pop("Content-Encoding", "identity") != "identity"
    return httpx.Response(response.status_code, headers=headers, content=b"" if compressed else bytes(body))


class RetryPolicy:
    """Decides whether one request is retried, and after how many seconds.

    arrived: how much of a long answer has come. Patience begins anew when more has come since the last failure.
    """

    def __init__(
        self,
        url: str,
        repeatable: bool,
        patience: float | None,
        on_wait: OnWait,
        hint: str,
        arrived: Callable[[], int] = lambda: 0,
    ) -> None:
        self._url = url
        self._repeatable = repeatable
        self._patience = patience
        self._on_wait = on_wait
        self._hint = hint
        self._arrived = arrived
        self._had_arrived = 0
        self._began = time.monotonic()

    def retries(self, error: BaseException) -> bool:
        """Whether the request is sent again. Calls on_wait then, which may raise to give up."""
        if not self._may_retry(error):
            return False
        if self._arrived() != self._had_arrived:
            self._had_arrived, self._began = self._arrived(), time.monotonic()
        waited = time.monotonic() - self._began
        if self._patience is not None and waited + (_retry_after(error) or 0.0) >= self._patience:
            return False
        self._on_wait(self._reason(error), waited)
        return True

    def seconds(self, state: tenacity.RetryCallState) -> float:
        """How long to wait before the next attempt: what the server asks for, else a backoff."""
        error = state.outcome.exception() if state.outcome else None
        asked = _retry_after(error)
        return _BACKOFF(state) if asked is None else asked

    def _may_retry(self, error: BaseException) -> bool:
        if isinstance(error, Unreachable):
            return error.passes and (self._repeatable or not error.done)
        if isinstance(error, RefServerError):
            overloaded = error.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
            return overloaded or (error.status >= 500 and self._repeatable)
        return False

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, Unreachable):
            return f"the reference server at {self._url} does not answer ({error.reason}){self._hint}"
        return f"the reference server at {self._url} says: {error}"


def _retry_after(error: BaseException | None) -> float | None:
    return error.retry_after if isinstance(error, RefServerError) else None


def unready_reason(error: ClientError) -> str:
    """Why the server is not ready, from a failed readiness request. Raises errors that waiting cannot fix."""
    if isinstance(error, RefServerError) and error.status >= 500:
        return error.message
    if isinstance(error, Unreachable) and error.passes:
        return str(error)
    raise error


def _first_line(error: Exception) -> str:
    """pydantic writes several lines for each field of an answer that is of another API."""
    return str(error).splitlines()[0]


def wait_silently(reason: str, seconds: float) -> None:
    """The default `on_wait`: reports nothing."""


def _authorization(token: str | None) -> dict[str, str]:
    if token is None:
        return {}
    check_token(token)
    return {"Authorization": f"Bearer {token}"}
