"""Reads request bodies within limits of size, time and memory."""

import asyncio
from collections.abc import Callable

from starlette.types import Message, Receive, Send

from ref_server.http.errors import Problem, busy

# A body may take FIRST_SECONDS, plus its length at this pace: 17 minutes for 64 MiB.
FIRST_SECONDS = 10.0
BYTES_PER_SECOND = 64 * 1024
# After a refusal the rest of the body is read and thrown away for this long: a client that still sends when the
# connection closes never reads the answer. Reading takes the time of those who are served, so all refused bodies
# together come at this pace; and uvicorn buffers a third of a MiB of each, so only so many are waited for.
LINGER_SECONDS = 10.0
LINGER_IDLE_SECONDS = 1.0
LINGER_BYTES_PER_SECOND = 16 * 2**20
MAX_LINGERING = 64


async def read_body(receive: Receive, take: Callable[[int], bool], most: int) -> bytes | None:
    """The whole body, or None when the client went away. Raises Problem 408, 413, 429.

    take: whether there is memory for so many bytes more. They count as they arrive: a large Content-Length alone
    blocks no other request.
    """
    begun = asyncio.get_running_loop().time()
    body = bytearray()
    more = True
    while more:
        try:
            async with asyncio.timeout_at(begun + FIRST_SECONDS + len(body) / BYTES_PER_SECOND):
                message: Message = await receive()
        except TimeoutError:
            raise too_slow(len(body)) from None
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


def too_slow(arrived: int) -> Problem:
    pace = f"a body may take {FIRST_SECONDS:g} s and a second for each {BYTES_PER_SECOND} bytes"
    return Problem(408, "too_slow", f"{pace}; {arrived} bytes arrived")


def too_large(most: int) -> Problem:
    message = f"the body must be at most {most} bytes" if most else "this route takes no body"
    return Problem(413, "too_large", message, "body")


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the whole body as one message, and keeps no copy of it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again


class Remains:
    """The rests of refused bodies: they are read and thrown away."""

    def __init__(self) -> None:
        self._coming = 0

    def behind(self, receive: Receive, send: Send) -> Send:
        """A `send` for an answer before the end of the body: it reads the rest, then ends the answer."""

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The next request would begin behind a body that was not read.
                await send({**message, "headers": [*message["headers"], (b"connection", b"close")]})
                return
            await send({**message, "more_body": True})
            if not message.get("more_body", False):
                await self.discard(receive)
                await send({"type": "http.response.body", "body": b""})

        return answer

    async def discard(self, receive: Receive) -> None:
        if self._coming == MAX_LINGERING:
            return
        self._coming += 1
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                more = True
                while more:
                    async with asyncio.timeout(LINGER_IDLE_SECONDS):
                        message = await receive()
                    more, size = message.get("more_body", False), len(message.get("body", b""))
                    del message
                    await asyncio.sleep(size * self._coming / LINGER_BYTES_PER_SECOND)
        except TimeoutError:
            return
        finally:
            self._coming -= 1
