"""Reads request bodies within limits of size, time and memory."""

import asyncio
from collections.abc import Callable

from starlette.types import Message, Receive

from ref_server.http.problem import Problem

# A body may take FIRST_SECONDS, plus its length at this pace: 17 minutes for 64 MiB.
FIRST_SECONDS = 10.0
BYTES_PER_SECOND = 64 * 1024
# After a refusal the rest of the body is read and thrown away for this long: a client that still sends when the
# connection closes never reads the answer.
LINGER_SECONDS = 10.0
LINGER_IDLE_SECONDS = 1.0


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
            pace = f"a body may take {FIRST_SECONDS:g} s and a second for each {BYTES_PER_SECOND} bytes"
            raise Problem(408, "too_slow", f"{pace}; {len(body)} bytes arrived") from None
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


def too_large(most: int) -> Problem:
    message = f"the body must be at most {most} bytes" if most else "this route takes no body"
    return Problem(413, "too_large", message, "body")


def busy(message: str) -> Problem:
    return Problem(429, "busy", message, headers={"Retry-After": "1"})


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the whole body as one message, and keeps no copy of it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again


async def discard(receive: Receive) -> None:
    """Reads the rest of a refused body, and throws it away."""
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            message: Message = {"more_body": True}
            while message.get("more_body", False):
                async with asyncio.timeout(LINGER_IDLE_SECONDS):
                    message = await receive()
    except TimeoutError:
        return
