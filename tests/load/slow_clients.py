"""Clients that hold connections and send or read almost nothing. They reconnect when they are cut off."""

import asyncio
import itertools
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from shared import wire
from tests.load.connection import get, head
from tests.load.crew import Stopping

_CLAIMED = 64 * 2**20
_SMALL_BUFFER = 4096
_READ_BYTES = 100

Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _head_by_bytes() -> AsyncIterator[bytes]:
    """An endless request head, one byte a second."""
    for byte in itertools.chain(get("/readyz")[:-2] + b"X-Slow: ", itertools.repeat(ord("a"))):
        yield bytes([byte])


async def _body_by_bytes() -> AsyncIterator[bytes]:
    """Announces a body of 64 MiB and sends a few bytes a second."""
    yield head("POST", "/v1/batches", _CLAIMED, wire.CONTENT_TYPE)
    yield (1000).to_bytes(8, "little")
    while True:
        yield b"    "


async def _chunks_by_bytes() -> AsyncIterator[bytes]:
    """A body of unknown length, in chunks of one byte."""
    yield (
        b"POST /v1/batches HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\nContent-Type: "
        + wire.CONTENT_TYPE.encode()
        + b"\r\n\r\n"
    )
    while True:
        yield b"1\r\n{\r\n"


async def _unread_answers() -> AsyncIterator[bytes]:
    """Requests some long answers at once and reads a hundred bytes a second."""
    yield get("/openapi.json") * 10
    while True:
        yield b""


async def _idle() -> AsyncIterator[bytes]:
    """One request, and then nothing for ever."""
    yield get("/livez")
    while True:
        yield b""


async def _silent() -> AsyncIterator[bytes]:
    """No request at all."""
    while True:
        yield b""


# What each kind sends, one piece a second.
KINDS: Mapping[str, Callable[[], AsyncIterator[bytes]]] = {
    "head a byte a second": _head_by_bytes,
    "64 MiB at 4 bytes a second": _body_by_bytes,
    "chunks of one byte": _chunks_by_bytes,
    "answers at 100 bytes a second": _unread_answers,
    "idle": _idle,
    "silent": _silent,
}
_SLOW_READER = "answers at 100 bytes a second"


async def trickle(port: int, stopping: Stopping, count: int) -> Counter[str]:
    """`count` slow clients; returns how often each kind connected, was answered, and was cut off."""
    seen: Counter[str] = Counter()
    kinds = itertools.islice(itertools.cycle(KINDS), count)
    await asyncio.gather(*(_come_again(port, stopping, kind, seen) for kind in kinds))
    return seen


async def _come_again(port: int, stopping: Stopping, kind: str, seen: Counter[str]) -> None:
    while not stopping():
        try:
            reader, writer = await _connect(port, kind)
        except OSError as error:
            seen[f"{kind}: {type(error).__name__}"] += 1
            await asyncio.sleep(1)
            continue
        seen[f"{kind}: connected"] += 1
        try:
            await _hold(reader, writer, stopping, kind, seen)
        except OSError:
            seen[f"{kind}: cut off"] += 1
            await asyncio.sleep(1)
        finally:
            writer.transport.abort()


async def _hold(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stopping: Stopping, kind: str, seen: Counter[str]
) -> None:
    async for piece in KINDS[kind]():
        writer.write(piece)
        due = time.monotonic() + 1
        while (left := due - time.monotonic()) > 0 and not stopping():
            answer = await _within(reader.read(_READ_BYTES), left)
            if answer == b"":
                raise ConnectionError("cut off")
            if kind == _SLOW_READER:
                await asyncio.sleep(due - time.monotonic())
            elif answer and answer.startswith(b"HTTP/1.1 "):
                seen[f"{kind}: {answer[9:12].decode()}"] += 1
        if stopping():
            return


async def _within(waiting: Awaitable[bytes], seconds: float) -> bytes | None:
    try:
        return await asyncio.wait_for(waiting, seconds)
    except TimeoutError:
        return None


async def _connect(port: int, kind: str) -> Wire:
    end = socket.socket()
    end.setblocking(False)
    if kind == _SLOW_READER:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
    await asyncio.get_running_loop().sock_connect(end, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=end, limit=_READ_BYTES)
