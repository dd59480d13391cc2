"""Sends answers within limits of time and memory."""

import asyncio
from collections.abc import Callable, Iterator
from time import monotonic

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ref_server.access.shares import Shares
from ref_server.http.gate.bodies import BYTES_PER_SECOND, FIRST_SECONDS, busy

# uvicorn buffers a whole message, and waits for the client only between two.
PIECE_BYTES = 64 * 1024
# A route that found no room is asked for its client once in so long, until there is room: it may read much in vain.
MEMORY_SECONDS = 1.0
_MAX_FULL = 1000


class Answers:
    """ASGI middleware, inside of the guard: a client's long answers hold at most its share of `most` bytes.

    An answer without room becomes 429, so its start waits for its body. Streams count their first message only: after
    that they wait for the client.
    """

    def __init__(self, app: ASGIApp, most: int, clock: Callable[[], float] = monotonic) -> None:
        self._app = app
        self._shares = Shares(most)
        self._clock = clock
        self._full_until: dict[tuple[str, str], float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        holder = scope["state"]["holder"]
        place, start, refused = (holder, scope["path"]), None, False

        async def refuse() -> None:
            message = "your long answers would fill more of the memory for them than is free; read faster"
            await busy(message).answer(scope)(scope, receive, send)

        async def pass_on(message: Message) -> None:
            nonlocal start, refused
            if message["type"] == "http.response.start":
                start = message
            elif not refused:
                with self._shares.hold(holder) as take:
                    size = len(message.get("body", b""))
                    if start and size > PIECE_BYTES and not take(size):
                        refused = True
                        self._note(place)
                        return await refuse()
                    self._full_until.pop(place, None)
                    if start:
                        await send(start)
                        start = None
                    await send(message)

        until = self._full_until.get(place)
        if until is not None and self._clock() < until:
            await refuse()
            return
        if until is not None:
            self._note(place)  # the others wait for what this one finds
        await self._app(scope, receive, pass_on)

    def _note(self, place: tuple[str, str]) -> None:
        if len(self._full_until) >= _MAX_FULL:
            self._full_until.clear()
        self._full_until[place] = self._clock() + MEMORY_SECONDS


class Pace:
    """ASGI middleware around the guard: sends in pieces, and wants them to be read at the least pace of a body.

    Only the time that a client lets the server wait counts, so that an answer may take as long as it will.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent, waited, over = 0, 0.0, False
        clock = asyncio.get_running_loop().time

        async def cut_off() -> None:
            scope["state"]["error_code"] = "too_slow"
            scope["state"]["abort"]()
            while (await receive())["type"] != "http.disconnect":
                pass  # until uvicorn knows, or it would log an answer without an end

        async def paced(message: Message) -> None:
            nonlocal sent, waited, over
            for piece in _pieces(message):
                if over:
                    return
                began = clock()
                try:
                    async with asyncio.timeout(FIRST_SECONDS + sent / BYTES_PER_SECOND - waited):
                        await send(piece)
                except TimeoutError:
                    over = True
                    await cut_off()
                waited += clock() - began
                sent += len(piece.get("body", b""))

        await self._app(scope, receive, paced if scope["type"] == "http" else send)


def _pieces(message: Message) -> Iterator[Message]:
    body = message.get("body", b"")
    last = max(0, len(body) - 1) // PIECE_BYTES * PIECE_BYTES
    for begin in range(0, last, PIECE_BYTES):
        yield {**message, "body": body[begin : begin + PIECE_BYTES], "more_body": True}
    yield {**message, "body": body[last:]} if last else message
