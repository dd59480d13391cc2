"""Sends answers within limits of time and memory."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ref_server.access.shares import Shares
from ref_server.http.gate.bodies import BYTES_PER_SECOND, FIRST_SECONDS, busy

# uvicorn buffers a whole message, and waits for the client only between two.
PIECE_BYTES = 64 * 1024


class Answers:
    """ASGI middleware around the guard: a client may read at the least pace of a body, and hold its share of `most`.

    An answer without room becomes 429, so its start waits for its body. Streams count their first message only: after
    that they wait for the client.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._shares = Shares(most)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = _Answer(scope, receive, send, self._shares).send
        await self._app(scope, receive, send)


class _Answer:
    def __init__(self, scope: Scope, receive: Receive, send: Send, shares: Shares) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._shares = shares
        self._start: Message | None = None
        self._over = False
        self._sent = 0
        self._waited = 0.0

    async def send(self, message: Message) -> None:
        body, more = message.get("body", b""), message.get("more_body", False)
        if message["type"] == "http.response.start":
            self._start = message
        elif len(body) <= PIECE_BYTES:
            await self._pass(message)
        elif not self._over:
            with self._shares.hold(self._scope["state"]["holder"]) as take:
                if self._start and not take(len(body)):
                    return await self._refuse()
                for end in range(PIECE_BYTES, len(body) + PIECE_BYTES, PIECE_BYTES):
                    piece = {"body": body[end - PIECE_BYTES : end], "more_body": more or end < len(body)}
                    await self._pass({"type": message["type"], **piece})

    async def _refuse(self) -> None:
        problem = busy("your answers would fill more of the memory for answers than is free; read those before faster")
        await problem.answer(self._scope)(self._scope, self._receive, self.send)
        self._over = True

    async def _pass(self, message: Message) -> None:
        if self._over:
            return
        start, self._start = self._start, None
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(FIRST_SECONDS + self._sent / BYTES_PER_SECOND - self._waited):
                if start:
                    await self._send(start)
                await self._send(message)
        except TimeoutError:
            await self._cut_off()
        self._waited += clock() - began
        self._sent += len(message.get("body", b""))

    async def _cut_off(self) -> None:
        self._over = True
        self._scope["state"]["error_code"] = "too_slow"
        self._scope["state"]["abort"]()
        while (await self._receive())["type"] != "http.disconnect":
            pass  # until uvicorn knows, or it would log an answer without an end
