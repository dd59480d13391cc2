"""Clients that take what they can: memory for bodies and answers, connections. All come from another address."""

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable

import httpx

from shared import wire
from tests.chaos.batches import random_batch
from tests.load.connection import head, post_json
from tests.load.crew import Stopping, play_all

# A holder of its own, beside the honest clients at 127.0.0.1.
ADDRESS = "127.0.0.2"
_MIB = 2**20
# Sixteen completions of half to all of this length are 24 MiB.
_LONGEST = 24 * _MIB // 8 // 12
_SMALL_BUFFER = 4096

Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def fill_open_routes(port: int, stopping: Stopping, count: int) -> Counter[str]:
    """Bodies for an open route that end one byte too soon: every fourth of 64 MiB, the others JSON of 1 MiB."""
    kinds = [(64 * _MIB, "application/octet-stream"), *[(_MIB, "application/json")] * 3]

    async def send(number: int, end: Wire) -> None:
        length, kind = kinds[number % len(kinds)]
        end[1].write(head("GET", "/livez", length, kind))
        for _ in range(length // _MIB - 1):
            end[1].write(bytes(_MIB))
            await end[1].drain()
        end[1].write(bytes(_MIB - 1))
        await end[0].read(1)

    return await _crowd(port, stopping, count, send)


async def hold_connections(port: int, stopping: Stopping, count: int) -> Counter[str]:
    """Connections without a request."""

    async def send(_: int, end: Wire) -> None:
        await end[0].read(1)

    return await _crowd(port, stopping, count, send)


async def read_slowly(port: int, stopping: Stopping, count: int) -> Counter[str]:
    """All lease the same batch of 24 MiB, by one `request_id`, and read a few kB a second of it."""
    batch = random_batch(random.Random(), "attack", longest=_LONGEST, completions=16)
    lease = {"consumer": "attack", "run": "attack", "request_id": "attack", "wait_seconds": 0}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        body = wire.encode(batch)
        (await http.post("/v1/batches", content=body, headers={"Content-Type": wire.CONTENT_TYPE})).raise_for_status()
        (await http.post("/v1/batches/lease", json=lease)).raise_for_status()

    async def send(_: int, end: Wire) -> None:
        end[1].write(post_json("/v1/batches/lease", lease))
        answer = await end[0].read(_SMALL_BUFFER)
        while answer.startswith(b"HTTP/1.1 200") or b"HTTP" not in answer:
            await asyncio.sleep(1)
            answer = await end[0].read(_SMALL_BUFFER)
            if not answer:
                raise ConnectionError

    return await _crowd(port, stopping, count, send)


async def _crowd(
    port: int, stopping: Stopping, count: int, send: Callable[[int, Wire], Awaitable[None]]
) -> Counter[str]:
    """`count` clients, each of which comes again a second after it was cut off."""
    seen: Counter[str] = Counter()

    async def come_again(number: int) -> None:
        while True:
            try:
                end = await _connect(port)
            except OSError as error:
                seen[type(error).__name__] += 1
                await asyncio.sleep(1)
                continue
            seen["connected"] += 1
            try:
                await send(number, end)
            except OSError:
                seen["cut off"] += 1
            finally:
                end[1].transport.abort()
            await asyncio.sleep(1)

    await play_all(stopping, [come_again(number) for number in range(count)])
    return seen


async def _connect(port: int) -> Wire:
    end = socket.socket()
    end.setblocking(False)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
    end.bind((ADDRESS, 0))
    await asyncio.get_running_loop().sock_connect(end, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=end, limit=_SMALL_BUFFER)
