"""Sends requests to one reference server: URL, credentials, retries, and limits of what is read."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from shared.client.credentials import check_token, trust
from shared.client.errors import NotRefServer, RefServerError, Unreachable, refusal, unreachable
from shared.client.proxies import connection_options
from shared.client.retry import OnWait, retried
from shared.client.transfers import WeightsDownload, pieces

T = TypeVar("T")
Record = TypeVar("Record", bound=BaseModel)

READ_SECONDS = 60.0
JSON = {"Content-Type": "application/json"}
# The longest JSON answer, a page of 1,000 batches or 5,000 steps, has a few MiB.
JSON_BYTES = 64 * 2**20

_CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class ApiCall(Generic[T]):
    """One request, and how its response is read.

    read: parses a successful response; raises ValueError or LookupError if it is not of this API. content: the body, or
    a file that has it. params: those that are None are left out. read_seconds: read timeout. repeatable: idempotent, so
    it may be retried even if it may have been carried out. download: receives the bytes of the response, of which
    `read` then sees only the headers. most: bytes of the longest legal response without a download.
    """

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    content: bytes | Path | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    read_seconds: float = READ_SECONDS
    repeatable: bool = True
    download: WeightsDownload | None = None
    most: int = JSON_BYTES


class ServerConnection:
    """A connection to one reference server, which may be shared between threads. `RefServerClient` has the API."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca: str | Path | None = None,
        patience: float | None = 30.0,
        on_wait: OnWait | None = None,
        hint: str = "",
    ) -> None:
        self.url = url
        self.patience = patience
        self.on_wait = on_wait
        self.hint = hint
        with self._translating():
            self._http = httpx.Client(
                base_url=url,
                # Uncompressed: a few KiB that expand to gigabytes would pass every limit.
                headers={"Accept-Encoding": "identity", **_authorization(token)},
                **connection_options(url, None if ca is None else trust(Path(ca))),
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def _get(self, path: str, record: type[Record], **params: Any) -> Record:
        """A GET request with this query, whose answer is JSON."""
        return self._send(ApiCall("GET", path, as_record(record), params=params))

    def _post(self, path: str, body: BaseModel, record: type[Record], *, read_seconds: float = READ_SECONDS) -> Record:
        """A POST request with JSON, whose answer is JSON. Fields that are None are left out."""
        content = body.model_dump_json(exclude_none=True).encode()
        return self._send(ApiCall("POST", path, as_record(record), content, JSON, read_seconds=read_seconds))

    def _send(self, call: ApiCall[T]) -> T:
        """Tries while waiting may help and patience lasts. Raises RefServerError, Unreachable, NotRefServer."""
        return retried(
            lambda: self._send_once(call),
            lambda error: self._reason_to_wait(call, error),
            self.on_wait,
            patience=self.patience,
            progress=lambda: call.download.size if call.download else 0,
        )

    def _reason_to_wait(self, call: ApiCall[Any], error: Exception) -> str | None:
        """None if the request may have been carried out and must not be repeated, or would fail again."""
        if isinstance(error, Unreachable) and error.passes and (call.repeatable or not error.done):
            return f"the reference server at {self.url} does not answer ({error.reason}){self.hint}"
        if isinstance(error, RefServerError) and (
            error.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
            or (error.status >= 500 and call.repeatable)
        ):
            return f"the reference server at {self.url} says: {error}"
        return None

    def _send_once(self, call: ApiCall[T]) -> T:
        with self._translating(), self._http.stream(**_arguments(call)) as response:
            self._check_encoding(response)
            if call.download and response.is_success:
                return self._receive(call, call.download, response)
            body = self._body(call, response)
        return self._read(call, whole(response, body))

    def _receive(self, call: ApiCall[T], download: WeightsDownload, response: httpx.Response) -> T:
        begun = self._read(call, response)
        for piece in response.iter_raw():
            download.write(piece)
        return begun

    def _body(self, call: ApiCall[Any], response: httpx.Response) -> bytearray:
        """The body of a response. Raises NotRefServer for one that is longer than any legal one."""
        body = bytearray()
        try:
            for piece in response.iter_raw():
                append(body, piece, call.most if response.is_success else JSON_BYTES)
        except ValueError as error:
            raise self._no_ref_server(f"{error} ({call.method} {call.path})") from None
        return body

    def _read(self, call: ApiCall[T], response: httpx.Response) -> T:
        """Parses a response. Raises RefServerError, NotRefServer."""
        if not response.is_success:
            raise refusal(response, self.url)
        try:
            return call.read(response)
        except (ValueError, LookupError) as error:
            # pydantic writes several lines for each field of an answer that is of another API
            first = str(error).splitlines()[0]
            raise NotRefServer(f"the server at {self.url} is not a reference server of this version: {first}") from None

    def _check_encoding(self, response: httpx.Response) -> None:
        """Raises NotRefServer for a compressed response, unless it is an error of some gateway."""
        encoding = response.headers.get("Content-Encoding", "identity")
        if response.is_success and encoding != "identity":
            raise self._no_ref_server(f"its answer is compressed ({encoding}), which was not requested")

    def _no_ref_server(self, reason: str) -> NotRefServer:
        return NotRefServer(f"the server at {self.url} is not a reference server: {reason}")

    @contextmanager
    def _translating(self) -> Generator[None]:
        """Turns httpx's connection errors into Unreachable."""
        try:
            yield
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise unreachable(error, self.url) from None


def route(*segments: str) -> str:
    """The path of a route of the API, whose segments are quoted: route("batches", id) is `/v1/batches/ID`."""
    return "/v1/" + "/".join(quote(segment, safe="") for segment in segments)


def as_record(record: type[Record]) -> Callable[[httpx.Response], Record]:
    """Reads the JSON of a response."""
    return lambda response: record.model_validate_json(response.content)


def no_answer(response: httpx.Response) -> None:
    """For a response whose status is all that matters."""


def whole(response: httpx.Response, body: bytearray) -> httpx.Response:
    """A streamed response with the body that was read from it; without it if that is compressed."""
    headers = response.headers.copy()
    compressed = headers.pop("Content-Encoding", "identity") != "identity"
    return httpx.Response(response.status_code, headers=headers, content=b"" if compressed else bytes(body))


def append(body: bytearray, piece: bytes, most: int) -> None:
    """Adds a piece of a response. Raises ValueError when the response becomes longer than `most` bytes."""
    body += piece
    if len(body) > most:
        raise ValueError(f"its answer is longer than {most / 2**20:g} MiB, the limit")


def _arguments(call: ApiCall[Any]) -> dict[str, Any]:
    """Arguments of httpx's `stream`. A file is read anew for each attempt."""
    content, download = call.content, call.download
    return {
        "method": call.method,
        "url": call.path,
        "params": {name: value for name, value in call.params.items() if value is not None},
        "content": pieces(content) if isinstance(content, Path) else content,
        "headers": {**call.headers, **(download.headers if download else {})},
        "timeout": httpx.Timeout(call.read_seconds, connect=min(call.read_seconds, _CONNECT_SECONDS)),
    }


def _authorization(token: str | None) -> dict[str, str]:
    if token is None:
        return {}
    check_token(token)
    return {"Authorization": f"Bearer {token}"}
