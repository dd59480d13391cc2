"""Slow and hostile clients: they hold connections and memory, and come back when they are cut off."""

import asyncio
import itertools
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial

import httpx

from shared import wire
from tests.harness.batches import random_batch
from tests.load.connection import get, head, post_json
from tests.load.crew import Stopping, play_all

# Of hostile clients: another address than that of the honest clients, 127.0.0.1.
ADDRESS = "127.0.0.2"
_MIB = 2**20
# Sixteen completions of half to all of this length are 24 MiB.
_LONGEST = 24 * _MIB // 8 // 12
_SMALL_BUFFER = 4096
_READ_BYTES = 100

Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]
# Uses a connection until it is cut off, or the task is cancelled; counts answers.
Send = Callable[[Wire, Counter[str]], Awaitable[None]]


async def fill_open_routes(port: int, stopping: Stopping, count: int) -> Counter[str]:
    """Bodies for an open route that end a byte too soon: every fourth of 64 MiB, the others JSON of 1 MiB."""

    async def send(length: int, kind: str, end: Wire, seen: Counter[str]) -> None:
        end[1].write(head("GET", "/livez", length, kind))
        for _ in range(length // _MIB - 1):
            end[1].write(bytes(_MIB))
            await end[1].drain()
        end[1].write(bytes(_MIB - 1))
        await end[0].read(1)

    large, small = partial(send, 64 * _MIB, "application/octet-stream"), partial(send, _MIB, "application/json")
    sends = [("64 MiB", large), *[("1 MiB", small)] * 3] * (count // 4)
    return await _crowd(port, stopping, sends, ADDRESS)


async def hold_connections(port: int, stopping: Stopping, count: int) -> Counter[str]:
    """Connections without a request."""

    async def send(end: Wire, _: Counter[str]) -> None:
        await end[0].read(1)

    return await _crowd(port, stopping, [("idle", send)] * count, ADDRESS)


async def read_slowly(port: int, stopping: Stopping, count: int) -> Counter[str]:
    """All lease the same batch of 24 MiB, by the same `request_id`, and read a few kB a second of it."""
    batch = random_batch(random.Random(), "attack", longest=_LONGEST, completions=16)
    lease = {"consumer": "attack", "run": "attack", "request_id": "attack", "wait_seconds": 0}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        body = wire.encode(batch)
        (await http.post("/v1/batches", content=body, headers={"Content-Type": wire.CONTENT_TYPE})).raise_for_status()
        (await http.post("/v1/batches/lease", json=lease)).raise_for_status()

    async def send(end: Wire, _: Counter[str]) -> None:
        end[1].write(post_json("/v1/batches/lease", lease))
        answer = await end[0].read(_SMALL_BUFFER)
        while answer.startswith(b"HTTP/1.1 200") or b"HTTP" not in answer:
            await asyncio.sleep(1)
            answer = await end[0].read(_SMALL_BUFFER)
            if not answer:
                raise ConnectionError

    return await _crowd(port, stopping, [("reader", send)] * count, ADDRESS)


async def trickle(port: int, stopping: Stopping, count: int) -> Counter[str]:
    """`count` clients of all kinds that send or read almost nothing."""
    kinds = itertools.islice(itertools.cycle(KINDS), count)
    return await _crowd(port, stopping, [(kind, partial(_hold, kind)) for kind in kinds], "127.0.0.1")


async def _head_by_bytes() -> AsyncIterator[bytes]:
    """An endless request head."""
    for byte in itertools.chain(get("/readyz")[:-2] + b"X-Slow: ", itertools.repeat(ord("a"))):
        yield bytes([byte])


async def _pieces(*first: bytes, then: bytes = b"") -> AsyncIterator[bytes]:
    for piece in itertools.chain(first, itertools.repeat(then)):
        yield piece


_CHUNKED = b"POST /v1/batches HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\nContent-Type: %b\r\n\r\n"
_BODY = head("POST", "/v1/batches", 64 * _MIB, wire.CONTENT_TYPE)
_SLOW_READER = "answers at 100 bytes a second"
# What each kind sends, a piece a second.
KINDS: Mapping[str, Callable[[], AsyncIterator[bytes]]] = {
    "head a byte a second": _head_by_bytes,
    "64 MiB at 4 bytes a second": partial(_pieces, _BODY, (1000).to_bytes(8, "little"), then=b"    "),
    "chunks of one byte": partial(_pieces, _CHUNKED % wire.CONTENT_TYPE.encode(), then=b"1\r\n{\r\n"),
    _SLOW_READER: partial(_pieces, get("/openapi.json") * 10),
    "idle": partial(_pieces, get("/livez")),
    "silent": _pieces,
}


async def _hold(kind: str, end: Wire, seen: Counter[str]) -> None:
    async for piece in KINDS[kind]():
        end[1].write(piece)
        due = time.monotonic() + 1
        while (left := due - time.monotonic()) > 0:
            try:
                answer = await asyncio.wait_for(end[0].read(_READ_BYTES), left)
            except TimeoutError:
                break
            if not answer:
                raise ConnectionError
            if kind == _SLOW_READER:
                await asyncio.sleep(due - time.monotonic())
            elif answer.startswith(b"HTTP/1.1 "):
                seen[f"{kind}: {answer[9:12].decode()}"] += 1


async def _crowd(port: int, stopping: Stopping, sends: Sequence[tuple[str, Send]], address: str) -> Counter[str]:
    """A client for each of `sends`, which comes back a second after it was cut off. Counts events by its name."""
    seen: Counter[str] = Counter()

    async def come_back(name: str, send: Send) -> None:
        while True:
            try:
                end = await _connect(port, address)
            except OSError as error:
                seen[f"{name}: {type(error).__name__}"] += 1
                await asyncio.sleep(1)
                continue
            seen[f"{name}: connected"] += 1
            try:
                await send(end, seen)
            except OSError:
                seen[f"{name}: cut off"] += 1
            finally:
                end[1].transport.abort()
            await asyncio.sleep(1)

    await play_all(stopping, [come_back(name, send) for name, send in sends])
    return seen


async def _connect(port: int, address: str) -> Wire:
    end = socket.socket()
    end.setblocking(False)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
    end.bind((address, 0))
    await asyncio.get_running_loop().sock_connect(end, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=end, limit=_SMALL_BUFFER)
