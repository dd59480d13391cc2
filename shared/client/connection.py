"""The base of both clients: everything but sending. URL, credentials, retries, reading responses."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import httpx
import stamina

from shared.client.credentials import check_token, trust
from shared.client.errors import ClientError, NotRefServer, RefServerError, Unreachable, refusal, unreachable
from shared.client.requests import Request

# Called before each retry with the reason and the seconds waited so far. May raise to give up.
OnWait = Callable[[str, float], None]

T = TypeVar("T")

_CONNECT_SECONDS = 5.0
_MAX_BACKOFF_SECONDS = 2.0
# Never reached through a proxy from the environment: a proxy on another machine would look for the server there, and
# would see the token.
_THIS_MACHINE = ("all://localhost", "all://127.0.0.1", "all://[::1]")


class Connection:
    """Base class of the clients. Subclasses send the requests."""

    def __init__(
        self, url: str, *, token: str | None, ca: str | Path | None, patience: float | None, on_wait: OnWait, hint: str
    ) -> None:
        stamina.instrumentation.set_on_retry_hooks(())  # on_wait reports retries instead
        self.url = url
        self._patience = patience
        self._on_wait = on_wait
        self._hint = hint
        self._options: dict[str, Any] = {
            "base_url": url,
            "headers": _authorization(token),
            "verify": True if ca is None else trust(Path(ca)),
            "mounts": dict.fromkeys(_THIS_MACHINE),
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def attempts(self, request: Request[Any]) -> Any:
        """An iterator of attempts, synchronous or asynchronous: retries while waiting may help and patience lasts."""
        retry_policy = _RetryPolicy(self.url, request.repeatable, self._patience, self._on_wait, self._hint)
        return stamina.retry_context(on=retry_policy, attempts=None, timeout=None, wait_max=_MAX_BACKOFF_SECONDS)

    def arguments(self, request: Request[Any]) -> dict[str, Any]:
        """Arguments of httpx's `request`."""
        return {
            "method": request.method,
            "url": request.path,
            "params": dict(request.params),
            "content": request.content,
            "headers": {"Content-Type": request.content_type} if request.content_type else {},
            "timeout": httpx.Timeout(request.read_seconds, connect=min(request.read_seconds, _CONNECT_SECONDS)),
        }

    @contextmanager
    def translating(self) -> Iterator[None]:
        """Turns httpx's connection errors into Unreachable, an undecodable response into NotRefServer."""
        try:
            yield
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise unreachable(error, self.url) from None
        except httpx.DecodingError as error:
            raise NotRefServer(f"the server at {self.url} is not a reference server: {error}") from None

    def read(self, request: Request[T], response: httpx.Response) -> T:
        """Parses a response. Raises RefServerError, NotRefServer."""
        if not response.is_success:
            raise refusal(response, self.url)
        try:
            return request.read(response)
        except (ValueError, LookupError) as error:
            words = f"the server at {self.url} is not a reference server of this version: {_first_line(error)}"
            raise NotRefServer(words) from None


class _RetryPolicy:
    """Decides whether one request is retried, and after how many seconds. For stamina's `on`."""

    def __init__(self, url: str, repeatable: bool, patience: float | None, on_wait: OnWait, hint: str) -> None:
        self._url = url
        self._repeatable = repeatable
        self._patience = patience
        self._on_wait = on_wait
        self._hint = hint
        self._began = time.monotonic()

    def __call__(self, error: Exception) -> bool | float:
        """False: raise the error. True: retry after the usual backoff. A number: retry after that many seconds."""
        if not self._may_retry(error):
            return False
        waited = time.monotonic() - self._began
        retry_after = error.retry_after if isinstance(error, RefServerError) else None
        if self._patience is not None and waited + (retry_after or 0.0) >= self._patience:
            return False
        self._on_wait(self._reason(error), waited)
        return True if retry_after is None else retry_after

    def _may_retry(self, error: Exception) -> bool:
        if isinstance(error, Unreachable):
            return error.passes and (self._repeatable or not error.done)
        if isinstance(error, RefServerError):
            overloaded = error.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
            return overloaded or (error.status >= 500 and self._repeatable)
        return False

    def _reason(self, error: Exception) -> str:
        if isinstance(error, Unreachable):
            return f"the reference server at {self._url} does not answer ({error.reason}){self._hint}"
        return f"the reference server at {self._url} says: {error}"


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
