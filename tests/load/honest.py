"""Clients as they should be: they upload, lease and acknowledge as fast as they are answered, or ask for readiness."""

import asyncio
import random
import time

from shared import wire
from tests.chaos.batches import random_batch
from tests.load.connection import Client, Tally, Uploads, get, post_json
from tests.load.crew import Stopping

_PROBE_SECONDS = 0.1
_BUSY_SECONDS = 0.1  # before a client that was sent away comes again


def uploads(tokens: int) -> Uploads:
    """Batches that nobody else has. tokens: of a completion, at most; there are eight."""
    batch = random_batch(random.Random(), "load", longest=tokens, completions=8)
    return Uploads(wire.encode(batch), batch.id)


async def work(port: int, stopping: Stopping, count: int, tokens: int) -> Tally:
    """So many clients that each upload a batch, then lease one and acknowledge it, over and over."""
    tally = Tally()
    await asyncio.gather(*(_cycle(Client(port, tally), stopping, uploads(tokens)) for _ in range(count)))
    return tally


async def _cycle(client: Client, stopping: Stopping, mine: Uploads) -> None:
    while not stopping():
        await _upload_one(client, mine)
        await settle_one(client, "honest", wait_seconds=0)
    client.close()


async def upload(port: int, stopping: Stopping, count: int, tokens: int) -> Tally:
    """So many clients that only upload."""

    async def go_on(client: Client, mine: Uploads) -> None:
        while not stopping():
            await _upload_one(client, mine)

    tally = Tally()
    await asyncio.gather(*(go_on(Client(port, tally), uploads(tokens)) for _ in range(count)))
    return tally


async def consume(port: int, stopping: Stopping, count: int) -> Tally:
    """So many clients that only lease and acknowledge."""

    async def go_on(client: Client, consumer: str) -> None:
        while not stopping():
            await settle_one(client, consumer, wait_seconds=1)

    tally = Tally()
    await asyncio.gather(*(go_on(Client(port, tally), f"consumer-{number}") for number in range(count)))
    return tally


async def _upload_one(client: Client, mine: Uploads) -> None:
    answer = await client.ask("upload", mine.next())
    if answer is not None and answer.status == 429:
        await asyncio.sleep(_BUSY_SECONDS)


async def settle_one(client: Client, consumer: str, wait_seconds: float) -> None:
    """Leases a batch and acknowledges it, if there is one in time."""
    answer = await client.ask(
        "lease", post_json("/v1/batches/lease", {"consumer": consumer, "wait_seconds": wait_seconds})
    )
    if answer is not None and answer.status == 200:
        key = {"id": answer.header("batch-id"), "token": answer.header("lease-token")}
        await client.ask("ack", post_json("/v1/leases/ack", {"leases": [key]}))


async def probe(port: int, stopping: Stopping) -> Tally:
    """Asks /readyz ten times a second, each time on a connection of its own, whether the last was answered or not."""
    tally = Tally()
    asked: set[asyncio.Task[None]] = set()
    due = time.monotonic()
    while not stopping():
        task = asyncio.create_task(_ask_once(port, tally))
        asked.add(task)
        task.add_done_callback(asked.discard)
        due += _PROBE_SECONDS
        await asyncio.sleep(max(0.0, due - time.monotonic()))
    await asyncio.gather(*asked)
    return tally


async def _ask_once(port: int, tally: Tally) -> None:
    client = Client(port, tally)
    await client.ask("readyz", get("/readyz"))
    client.close()
