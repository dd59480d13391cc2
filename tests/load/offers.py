"""More uploads than the server can take: they come when they come, whether the ones before are answered or not."""

import asyncio
import time

from tests.load.connection import Client, Tally
from tests.load.crew import Stopping
from tests.load.honest import uploads

# Beyond so many unanswered ones no more are offered: the machine has no connections for them.
_MAX_UNANSWERED = 800
_TICK_SECONDS = 0.005


async def offer(port: int, stopping: Stopping, rate: float, tokens: int) -> Tally:
    """Uploads at a rate, a second; what does not fit _MAX_UNANSWERED is left out, which the tally then shows."""
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
