"""More uploads than the server can take, at a fixed rate, without waiting for earlier answers."""

import asyncio
import time

from tests.load.connection import Client, Tally
from tests.load.crew import Stopping
from tests.load.honest import uploads

# The machine has no connections for more unanswered uploads.
_MAX_UNANSWERED = 800
_TICK_SECONDS = 0.005


async def offer(port: int, stopping: Stopping, rate: float, tokens: int) -> Tally:
    """Uploads `rate` batches a second; uploads beyond _MAX_UNANSWERED are skipped and missing in the tally."""
    tally, mine = Tally(), uploads(tokens)
    idle: list[Client] = []
    clients: list[Client] = []
    asked: set[asyncio.Task[None]] = set()

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
                asked.add(task)
                task.add_done_callback(asked.discard)
        await asyncio.sleep(_TICK_SECONDS)
    await asyncio.gather(*asked)
    for client in clients:
        client.close()
    return tally
