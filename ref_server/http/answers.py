"""Sends answers within limits of time and memory."""

import asyncio
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ref_server.access.shares import Shares
from ref_server.http.bodies import Pace
from ref_server.http.errors import DELAY_SECONDS

# uvicorn buffers a whole message, and waits for the client only between two.
PIECE_BYTES = 64 * 1024
# Each client gets at most so many refusals a second: one costs as much time as a small request that is served.
REFUSALS_PER_SECOND = 20


class Answers:
    """ASGI middleware around the guard: sends answers in pieces, which the client must read at the least pace of a
    body, and bounds the bytes of long answers in memory; of these `most` a client may hold as much as is free.

    The state of a request gets `room`: a route calls it before it reads what would make a long answer, and refuses if
    there is none. That refusal is delayed, the longer the more refusals the client is already waiting for.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._shares = Shares(most)
        self._refused: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, receive, send, self._shares, self._refused)
        scope["state"]["room"] = answer.room
        try:
            await self._app(scope, receive, answer.send)
        finally:
            answer.release()


class _Answer:
    def __init__(self, scope: Scope, receive: Receive, send: Send, shares: Shares, refused: Counter[str]) -> None:
        """refused: how many refusals each client waits for."""
        self._state = scope["state"]
        self._receive = receive
        self._send = send
        self._shares = shares
        self._refused = refused
        self._pace = Pace()
        self._has_room = True
        self._held = 0
        self._cut_off = False

    def room(self, size: int) -> bool:
        """Whether there is memory for `size` bytes of this answer. It is held until the answer is sent."""
        more = max(0, size - self._held)
        self._has_room = not more or self._shares.take(self._state["holder"], more)
        self._held += more * self._has_room
        return self._has_room

    def release(self) -> None:
        if self._held:
            self._shares.give(self._state["holder"], self._held)

    async def send(self, message: Message) -> None:
        body = message.get("body", b"")
        if len(body) > PIECE_BYTES and not self.room(len(body)):
            await self._abort("busy")  # a flood of middling answers; routes of larger ones have called `room` before
        elif not self._has_room and message["type"] == "http.response.start":
            await self._delay()
        if len(body) <= PIECE_BYTES:
            await self._send_in_time(message)
            return
        for begin in range(0, len(body), PIECE_BYTES):
            more = message.get("more_body", False) or begin + PIECE_BYTES < len(body)
            await self._send_in_time({**message, "body": body[begin : begin + PIECE_BYTES], "more_body": more})

    async def _delay(self) -> None:
        client = self._state["holder"]
        self._refused[client] += 1
        try:
            await asyncio.sleep(DELAY_SECONDS + self._refused[client] / REFUSALS_PER_SECOND)
        finally:
            self._refused.subtract([client])
            if not self._refused[client]:
                del self._refused[client]

    async def _send_in_time(self, piece: Message) -> None:
        if self._cut_off:
            return
        try:
            await self._pace.wait(self._send(piece))
        except TimeoutError:
            await self._abort("too_slow")
        self._pace.bytes += len(piece.get("body", b""))

    async def _abort(self, code: str) -> None:
        self._cut_off = True
        self._state["error_code"] = code
        self._state["abort"]()
        while (await self._receive())["type"] != "http.disconnect":
            pass  # until uvicorn knows, or it would log an answer without an end
