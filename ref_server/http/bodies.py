"""Reads request bodies within limits of size, pace and memory, and parses them in threads."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Send

from ref_server.http.errors import HttpError, busy
from ref_server.scoring.reference import Busy

T = TypeVar("T")

# A body, or an answer, may take FIRST_SECONDS, plus its length at this pace: 17 minutes for 64 MiB.
FIRST_SECONDS = 10.0
BYTES_PER_SECOND = 64 * 1024
# A long streamed body that came fast is hours ahead of the least pace. It still may not stop for longer than this.
IDLE_SECONDS = 30.0
# After a refusal the rest of the body is read and thrown away for this long: a client that still sends when the
# connection closes never reads the answer. Reading takes time from the clients that are served, so the rests of all
# refused bodies together are read at this pace; and uvicorn buffers a third of a MiB of each, so they are bounded.
LINGER_SECONDS = 10.0
LINGER_IDLE_SECONDS = 1.0
LINGER_BYTES_PER_SECOND = 16 * 2**20
MAX_LINGERING = 64


class Pace:
    """Bounds the time that a client makes the server wait: FIRST_SECONDS, and a second for each BYTES_PER_SECOND bytes.

    Time in which the server works does not count. bytes: what has arrived, or was sent.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._waited = 0.0

    async def wait(self, client: Awaitable[T], at_most: float = math.inf) -> T:
        """What the client does. Raises TimeoutError when it is too slow, or takes longer than `at_most` seconds."""
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(min(at_most, FIRST_SECONDS + self.bytes / BYTES_PER_SECOND - self._waited)):
                return await client
        finally:
            self._waited += clock() - began


class RefusedBodies:
    """Throws away what still arrives of refused bodies."""

    def __init__(self) -> None:
        self._arriving = 0

    async def discard(self, receive: Receive) -> None:
        """Returns at the end of the body, after LINGER_SECONDS, or at once when MAX_LINGERING bodies are arriving."""
        if self._arriving == MAX_LINGERING:
            return
        self._arriving += 1
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                more = True
                while more:
                    async with asyncio.timeout(LINGER_IDLE_SECONDS):
                        message = await receive()
                    more, size = message.get("more_body", False), len(message.get("body", b""))
                    del message
                    await asyncio.sleep(size * self._arriving / LINGER_BYTES_PER_SECOND)
        except TimeoutError:
            return
        finally:
            self._arriving -= 1


class Body:
    """The body of one request. If it is answered before the body has arrived, the rest is discarded.

    receive, send: those of ASGI. They replace the server's for the code that answers the request.
    """

    def __init__(self, headers: Headers, receive: Receive, send: Send, refused: RefusedBodies) -> None:
        self._receive = receive
        self._send = send
        self._refused = refused
        self._pace = Pace()
        self._arrived = "transfer-encoding" not in headers and headers.get("content-length", "0") == "0"
        self._answered_early = False

    async def receive(self, at_most: float = IDLE_SECONDS) -> Message:
        """The next piece; it may take `at_most` seconds. Raises HttpError 408."""
        if self._arrived:
            return await self._receive()
        try:
            message = await self._pace.wait(self._receive(), at_most)
        except TimeoutError:
            pace = f"a body may take {FIRST_SECONDS:g} s and a second for each {BYTES_PER_SECOND} bytes"
            raise HttpError(408, "too_slow", f"{pace}; {self._pace.bytes} bytes arrived") from None
        self._pace.bytes += len(message.get("body", b""))
        self._arrived = not message.get("more_body", False)
        return message

    async def read(self, take: Callable[[int], bool], most: int) -> bytes | None:
        """The whole body, or None when the client went away. Raises HttpError 408, 413, 429.

        take: whether there is memory for so many bytes more. They count as they arrive: a large Content-Length by
        itself blocks no other request.
        """
        body = bytearray()
        more = True
        while more:
            message = await self.receive(at_most=math.inf)
            if message["type"] == "http.disconnect":
                return None
            chunk = message.get("body", b"")
            if len(body) + len(chunk) > most:
                raise too_large(most)
            if chunk and not take(len(chunk)):
                raise busy("your request bodies would fill more of the memory for bodies than is free")
            body += chunk
            more = message.get("more_body", False)
        return bytes(body)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._answered_early = not self._arrived
            if self._answered_early:  # the next request would begin behind a body that was not read
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await self._send(message)
        elif self._answered_early and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._refused.discard(self._receive)
            await self._send({"type": "http.response.body", "body": b""})
        else:
            await self._send(message)


def too_large(most: int) -> HttpError:
    message = f"the body must be at most {most} bytes" if most else "this route takes no body"
    return HttpError(413, "too_large", message, "body")


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the whole body as one message, and keeps no copy of it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again


class BodyThreads:
    """Runs at most `threads` calls at once. Others wait, up to `most` calls in all."""

    def __init__(self, *, threads: int, most: int) -> None:
        self._limiter = CapacityLimiter(threads)
        self._most = most
        self._calls = 0

    async def run(self, call: Callable[[], T]) -> T:
        """What the call returns or raises. Raises Busy when `most` calls run or wait already."""
        if self._calls >= self._most:
            raise Busy(f"{self._most} bodies are being processed already")
        self._calls += 1
        try:
            return await to_thread.run_sync(call, limiter=self._limiter)
        finally:
            self._calls -= 1
