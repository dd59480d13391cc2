"""Requests to a running `vllm serve`."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import httpx

from shared.client.connection import OnWait

T = TypeVar("T")

_CONNECT_SECONDS = 5.0
# The server answers once the last completion of a prompt has ended. Longer than this nothing takes.
_READ_SECONDS = 3600.0
_RETRY_SECONDS = 1.0


class Unavailable(Exception):
    """The server does not answer, or not now."""


class Refused(Exception):
    """The server refused a request. status: of HTTP."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


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

    async def config(self) -> Mapping[str, Any]:
        """Of it vLLM's own configuration."""
        return (await self.info())["vllm_config"]

    async def _ask(self, method: str, path: str, **options: Any) -> Any:
        try:
            response = await self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise Unavailable(str(error) or type(error).__name__) from None
        if response.status_code in (429, 503):
            raise Unavailable(_words(response))
        if not response.is_success:
            raise Refused(response.status_code, _words(response))
        return response.json() if "json" in response.headers.get("content-type", "") else response.text


def ask(url: str, work: Callable[[VllmClient], Awaitable[T]]) -> T:
    """The result of `work`, which gets a client of its own."""

    async def run() -> T:
        timeout = httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=None)
        # A proxy of the environment is for the internet: it would look for the server elsewhere.
        async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, trust_env=False) as http:
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
    except (ValueError, LookupError, TypeError):
        text = response.text
    return f"{response.status_code}: {' '.join(str(text).split())[:300]}"
