"""How the body of a request reaches its route: read whole before, streamed, or not at all."""

import asyncio
import sys
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ref_server.access.shares import Shares
from ref_server.http.errors import busy
from ref_server.http.gate.bodies import BYTES_PER_SECOND, FIRST_SECONDS, Remains, read_body, replay, too_slow

# What a streamed body holds of the memory for bodies: what its route gathers for one write, and uvicorn's buffer.
STREAM_BYTES = 2 * 2**20
# A long body that came fast is hours ahead of the least pace. It may still not stop for longer than this.
IDLE_SECONDS = 30.0


class Intake(Protocol):
    @property
    def most(self) -> int | None:
        """The greatest length; None: it is not looked at."""
        ...

    async def __call__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the application. Raises Problem 408, 413, 429."""
        ...


class UnreadBody:
    """There is no such route, as the router will say."""

    most = None

    async def __call__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, replay(b"", receive), send)


class WholeBody:
    """Read before the application is called."""

    def __init__(self, shares: Shares, most: int) -> None:
        self.most = most
        self._shares = shares

    async def __call__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        with self._shares.hold(scope["state"]["holder"]) as take:
            body = await read_body(receive, take, self.most)
            if body is not None:
                receive, body = replay(body, receive), None  # so that only the route holds the body
                await app(scope, receive, send)


class StreamedBody:
    """Read by the route, a piece at a time, at the least pace of all bodies."""

    most = sys.maxsize

    def __init__(self, shares: Shares, remains: Remains) -> None:
        self._shares = shares
        self._remains = remains

    async def __call__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        with self._shares.hold(scope["state"]["holder"]) as take:
            if not take(STREAM_BYTES):
                raise busy("your uploads would fill more of the memory for bodies than is free")
            stream = _Stream(receive)
            early = self._remains.behind(receive, send)

            async def answer(message: Message) -> None:
                stream.answered_early |= message["type"] == "http.response.start" and not stream.whole
                await (early if stream.answered_early else send)(message)

            await app(scope, stream.receive, answer)


class _Stream:
    """Only the time that the client lets the server wait counts: a slow disk is not the client's fault."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._arrived = 0
        self._waited = 0.0
        self.whole = False
        self.answered_early = False

    async def receive(self) -> Message:
        if self.whole:
            return await self._receive()
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(min(IDLE_SECONDS, self._seconds_left())):
                message = await self._receive()
        except TimeoutError:
            raise too_slow(self._arrived) from None
        self._waited += clock() - began
        self._arrived += len(message.get("body", b""))
        self.whole = not message.get("more_body", False)
        return message

    def _seconds_left(self) -> float:
        return FIRST_SECONDS + self._arrived / BYTES_PER_SECOND - self._waited
