"""Has the store tidied once a minute, a slice at a time, so that requests get their turn between the slices."""

import asyncio

import structlog
from anyio import CapacityLimiter, to_thread

from ref_server.queue.errors import StorageBroken, StorageFull
from ref_server.queue.interface import Queue

log = structlog.get_logger()

EVERY_SECONDS = 60.0
BETWEEN_SLICES_SECONDS = 0.05


async def keep_tidy(queue: Queue) -> None:
    thread = CapacityLimiter(1)
    while True:
        more = False
        try:
            more = await to_thread.run_sync(queue.tidy, limiter=thread)
        except (StorageBroken, StorageFull) as error:
            log.warning("the store cannot be tidied", error=str(error))
        await asyncio.sleep(BETWEEN_SLICES_SECONDS if more else EVERY_SECONDS)
