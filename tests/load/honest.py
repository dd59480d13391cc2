"""Well-behaved clients: they upload, lease and ack as fast as the server answers, or probe its readiness."""

import asyncio
import random
import time

from shared import wire
from tests.harness.batches import random_batch
from tests.load.connection import Client, Tally, Uploads, get, post_json
from tests.load.crew import Stopping

_PROBE_SECONDS = 0.1
# The machine has no connections for more unanswered uploads.
_MAX_UNANSWERED = 800
_PAUSE_SECONDS = 0.1  # after a lease without a batch, or a 429


def uploads(tokens: int) -> Uploads:
    """Uploads with ids that no other client has. tokens: of a completion, at most; a batch has eight."""
    batch = random_batch(random.Random(), "load", longest=tokens, completions=8)
    return Uploads(wire.encode(batch), batch.id)


async def work(port: int, stopping: Stopping, count: int, tokens: int) -> Tally:
    """`count` clients that each upload a batch, then lease one and ack it, repeatedly.

    After a 429 a client uploads again when Retry-After has passed, and leases meanwhile.
    """
    tally = Tally()
    await asyncio.gather(*(_cycle(Client(port, tally), stopping, uploads(tokens)) for _ in range(count)))
    return tally


async def _cycle(client: Client, stopping: Stopping, mine: Uploads) -> None:
    upload_at = 0.0
    while not stopping():
        if time.monotonic() >= upload_at:
            answer = await client.ask("upload", mine.next())
            if answer is not None and answer.status == 429:
                upload_at = time.monotonic() + float(answer.header("retry-after"))
        if not await settle_one(client, "honest", wait_seconds=0):
            await asyncio.sleep(_PAUSE_SECONDS)
    client.close()


async def upload(port: int, stopping: Stopping, count: int, tokens: int) -> Tally:
    """`count` clients that only upload, and keep the queue full."""

    async def go_on(client: Client, mine: Uploads) -> None:
        while not stopping():
            answer = await client.ask("upload", mine.next())
            if answer is not None and answer.status == 429:
                await asyncio.sleep(_PAUSE_SECONDS)

    tally = Tally()
    await asyncio.gather(*(go_on(Client(port, tally), uploads(tokens)) for _ in range(count)))
    return tally


async def offer(port: int, stopping: Stopping, rate: float, tokens: int) -> Tally:
    """Uploads `rate` batches a second without waiting for answers.

    Uploads beyond _MAX_UNANSWERED are skipped, and missing in the tally.
    """
    tally, mine = Tally(), uploads(tokens)
    idle: list[Client] = []
    clients: list[Client] = []
    requests: set[asyncio.Task[None]] = set()

    async def ask(client: Client) -> None:
        await client.ask("upload", mine.next())
        idle.append(client)

    began, offered = time.monotonic(), 0
    while not stopping():
        for _ in range(int(rate * (time.monotonic() - began)) - offered):
            offered += 1
            if not idle and len(clients) < _MAX_UNANSWERED:
                clients.append(Client(port, tally))
                idle.append(clients[-1])
            if idle:
                task = asyncio.create_task(ask(idle.pop()))
                requests.add(task)
                task.add_done_callback(requests.discard)
        await asyncio.sleep(0.005)
    await asyncio.gather(*requests)
    for client in clients:
        client.close()
    return tally


async def consume(port: int, stopping: Stopping, count: int) -> Tally:
    """`count` clients that only lease and ack."""

    async def go_on(client: Client, consumer: str) -> None:
        while not stopping():
            await settle_one(client, consumer, wait_seconds=1)

    tally = Tally()
    await asyncio.gather(*(go_on(Client(port, tally), f"consumer-{number}") for number in range(count)))
    return tally


async def settle_one(client: Client, consumer: str, wait_seconds: float) -> bool:
    """Leases a batch and acks it; False if none was ready within `wait_seconds`."""
    answer = await client.ask(
        "lease", post_json("/v1/batches/lease", {"consumer": consumer, "wait_seconds": wait_seconds})
    )
    if answer is not None and answer.status == 200:
        key = {"id": answer.header("batch-id"), "token": answer.header("lease-token")}
        await client.ask("ack", post_json("/v1/leases/ack", {"leases": [key]}))
        return True
    return False


async def probe(port: int, stopping: Stopping) -> Tally:
    """Requests /readyz ten times a second, each time on a new connection, without waiting for earlier answers."""
    tally = Tally()
    requests: set[asyncio.Task[None]] = set()
    due = time.monotonic()
    while not stopping():
        task = asyncio.create_task(_ask_once(port, tally))
        requests.add(task)
        task.add_done_callback(requests.discard)
        due += _PROBE_SECONDS
        await asyncio.sleep(max(0.0, due - time.monotonic()))
    await asyncio.gather(*requests)
    return tally


async def _ask_once(port: int, tally: Tally) -> None:
    client = Client(port, tally)
    await client.ask("readyz", get("/readyz"))
    client.close()
