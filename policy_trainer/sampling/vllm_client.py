"""Requests to a running `vllm serve`."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from shared.client.connection import OnWait, whole
from shared.client.transfers import append
from shared.errors import printable

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

_CONNECT_SECONDS = 5.0
# The server answers once the last completion of a prompt has ended. Longer than this nothing takes.
_READ_SECONDS = 3600.0
_RETRY_SECONDS = 1.0
# A sampled token takes some 100 bytes of JSON.
_ANSWER_BYTES = 2**30


class Unavailable(Exception):
    """The server does not answer, or not now."""


class Refused(Exception):
    """The server refused a request. status: of HTTP."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Malformed(Refused):
    """The server answered something that vLLM does not."""

    def __init__(self, words: str) -> None:
        super().__init__(200, words)


class VllmClient:
    """Sends requests of one `persist` call. Raises Unavailable, Refused."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def get(self, path: str) -> Any:
        return await self._ask("GET", path)

    async def post(self, path: str, body: Any = None, **params: str) -> Any:
        return await self._ask("POST", path, json=body, params=params)

    async def info(self) -> Mapping[str, Any]:
        """What the server was started with. Refused with 404 without its development mode."""
        return await self.get("/server_info?config_format=json")

    async def config(self, *path: str, kind: type[T]) -> T:
        """A value of vLLM's own configuration."""
        return answer_field(await self.info(), "vllm_config", *path, kind=kind)

    async def _ask(self, method: str, path: str, **options: Any) -> Any:
        body = bytearray()
        try:
            async with self._http.stream(method, path, **options) as response:
                async for piece in response.aiter_raw():
                    append(body, piece, _ANSWER_BYTES)
        except httpx.TransportError as error:
            raise Unavailable(str(error) or type(error).__name__) from None
        except ValueError as error:
            raise Malformed(f"{method} {path}: {error}") from None
        response = whole(response, body)
        if response.status_code in (429, 503):
            raise Unavailable(_words(response))
        if not response.is_success:
            raise Refused(response.status_code, _words(response))
        if "json" not in response.headers.get("content-type", ""):
            return response.text
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise Malformed(f"{method} {path}: its answer is not JSON: {error}") from None


def answer_field(answer: Any, *path: str, kind: type[T]) -> T:
    """The value at `path` of an answer. Raises Malformed if it is missing or of another type."""
    for name in path:
        answer = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(answer, kind):
        raise Malformed(f"its answer has no usable {'.'.join(path)}")
    return answer


def parsed(answer: Any, kind: type[M]) -> M:
    """The answer as a record. Raises Malformed for one that is not of this kind."""
    try:
        return kind.model_validate(answer)
    except ValidationError as error:
        first = error.errors()[0]
        raise Malformed(f"invalid answer at {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def ask(url: str, work: Callable[[VllmClient], Awaitable[T]]) -> T:
    """The result of `work`, which gets a client of its own."""

    async def run() -> T:
        timeout = httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=None)
        # A proxy of the environment is for the internet: it would look for the server elsewhere.
        plain = {"Accept-Encoding": "identity"}  # see `_ANSWER_BYTES`: no answer is expanded
        async with httpx.AsyncClient(
            base_url=url, headers=plain, timeout=timeout, limits=limits, trust_env=False
        ) as http:
            return await work(VllmClient(http))

    return asyncio.run(run())


async def all_of(requests: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in order. If one fails the others are cancelled, and have ended when its error is raised."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def persist(url: str, work: Callable[[VllmClient], Awaitable[T]], on_wait: OnWait) -> T:
    """`ask`, from the start again while the server is unavailable, until on_wait raises."""
    began = time.monotonic()
    while True:
        try:
            return ask(url, work)
        except Unavailable as error:
            on_wait(f"the vLLM server at {url} to answer ({error})", time.monotonic() - began)
            time.sleep(_RETRY_SECONDS)


def _words(response: httpx.Response) -> str:
    """vLLM's own words, in a line."""
    try:
        error = response.json()["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, LookupError, TypeError, RecursionError):
        text = response.text
    return f"{response.status_code}: {printable(' '.join(str(text)[:300].split()))}"
