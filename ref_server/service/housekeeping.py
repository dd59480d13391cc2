"""Has a store tidied once a minute, a slice at a time, so that requests get their turn between the slices."""

import asyncio
from collections.abc import Callable

import structlog
from anyio import CapacityLimiter, to_thread

from ref_server.background import BackgroundLoop
from ref_server.queue.errors import StorageBroken, StorageFull

log = structlog.get_logger()

EVERY_SECONDS = 60.0
BETWEEN_SLICES_SECONDS = 0.05


async def keep_tidy(tidy: Callable[[], bool], loop: BackgroundLoop) -> None:
    """tidy: does a slice of the work, and says whether there is more."""
    thread = CapacityLimiter(1)
    while True:
        more = False
        with loop.turn():
            try:
                more = await to_thread.run_sync(tidy, limiter=thread)
            except (StorageBroken, StorageFull) as error:
                log.warning("a store cannot be tidied", error=str(error))
        await asyncio.sleep(loop.pause or (BETWEEN_SLICES_SECONDS if more else EVERY_SECONDS))
