"""Sheds load: refuses most uploads of a run, before they are decoded, while its share of the queue is used up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ref_server.http.errors import DELAY_SECONDS
from ref_server.queue.errors import NoRoom
from shared import wire

# While a run's share is used up, this many of its uploads at a time probe whether it still is. One that is refused
# counts for PROBE_SECONDS, so that at most 32 a second are decoded in vain.
MAX_PROBES = 16
PROBE_SECONDS = 0.5
# All uploads are let in again this long after the last one that found no room.
MEMORY_SECONDS = 5.0
# Runs whose fullness is remembered: clients name the runs.
MAX_RUNS = 1000


@dataclass
class _FullRun:
    """reason, retry_after: of the queue's last refusal. forgotten_at: by the loop's clock. probes: that count now."""

    reason: str = ""
    retry_after: float = 0.0
    forgotten_at: float = 0.0
    probes: int = 0

    def end_probe(self) -> None:
        self.probes -= 1


class LoadShedder:
    """Remembers for a moment for which runs the queue had no room. Used on the event loop.

    The queue finds out that it is full only after an upload was decoded and hashed. Under overload, refused uploads
    would use up the time that accepted ones need. So while there is no room for a run, only a few uploads of it are let
    in as probes, and all others are refused.
    """

    def __init__(self) -> None:
        self._full: dict[str, _FullRun] = {}

    @asynccontextmanager
    async def admission(self, body: bytes) -> AsyncIterator[None]:
        """Around the handling of an upload. Raises NoRoom, after a delay, if it is not let in."""
        loop = asyncio.get_running_loop()
        run = (wire.run_of(body) or "") if self._full else ""
        full = self._full.get(run)
        if full and loop.time() > full.forgotten_at:
            full = None
            del self._full[run]
        if full and full.probes >= MAX_PROBES:
            await asyncio.sleep(DELAY_SECONDS)
            raise NoRoom(full.reason, run, full.retry_after)
        if full:
            full.probes += 1
        still_counts = 0.0
        try:
            yield
        except NoRoom as error:
            still_counts = PROBE_SECONDS
            self._note(error, loop.time())
            raise
        finally:
            if full:
                loop.call_later(still_counts, full.end_probe)

    def _note(self, error: NoRoom, now: float) -> None:
        full = self._full.pop(error.run, None) or _FullRun()
        full.reason, full.retry_after, full.forgotten_at = str(error), error.retry_after, now + MEMORY_SECONDS
        self._full[error.run] = full  # the newest is the last
        if len(self._full) > MAX_RUNS:
            del self._full[next(iter(self._full))]
