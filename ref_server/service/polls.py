"""Lease requests that wait for a batch. While they wait they cost no transaction and no thread."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from heapq import merge
from operator import attrgetter

from anyio import CapacityLimiter, to_thread

from ref_server.access.shares import Shares
from ref_server.background import BackgroundLoop
from ref_server.queue.errors import StorageBroken, StorageFull
from ref_server.queue.queue import Queue
from ref_server.queue.records import Wanted
from ref_server.scoring.reference import Busy

# While requests wait, the store is looked at this often, in seconds: leases expire, and other servers share it.
LOOK_SECONDS = 0.5
# The lineages that wait are noted as present this often, in seconds; that counts for ten.
ALIVE_SECONDS = 3.0
# Requests that wait at once. Each costs a connection and some kilobytes.
MAX_POLLS = 8192


class Poll:
    """A request that waits in line. arrival: its place among all."""

    def __init__(self, wanted: Wanted, arrival: int) -> None:
        self.wanted = wanted
        self.arrival = arrival
        self._rung = asyncio.Event()
        self.owes = False
        """Woken, but has not polled yet."""

    @property
    def rung(self) -> bool:
        return self._rung.is_set()

    def ring(self) -> None:
        self._rung.set()

    def looked(self) -> None:
        """To be called after each look for a batch, whether it got one or not."""
        self.owes = False

    async def wait(self, seconds: float) -> bool:
        """Waits until it is woken: then there may be a batch for it. False after so many seconds."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._rung.wait()
        except TimeoutError:
            return False
        self._rung.clear()
        self.owes = True
        return True


class Polls:
    """Keeps the requests that wait, by run, and wakes as many as there are batches for, in the order of arrival.

    Used on the event loop, except `ring`, `look_now` and `wake_all`, which any thread may call.
    """

    def __init__(self, most: int = MAX_POLLS) -> None:
        self.background = BackgroundLoop("polling for batches for waiting leases")
        self._shares = Shares(most)
        self._lines: dict[str | None, dict[Poll, None]] = {}
        self._arrivals = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting_now = asyncio.Event()
        self._asked = asyncio.Event()

    @contextmanager
    def join(self, wanted: Wanted, holder: str) -> Iterator[Poll]:
        """A place in line. Take it before looking for a batch, so that none is missed. Raises Busy.

        holder: the client, which may hold at most as many places as are free.
        """
        if not self._shares.take(holder):
            raise Busy(f"too many lease requests of {holder} wait already")
        poll = Poll(wanted, next(self._arrivals))
        self._lines.setdefault(wanted.run, {})[poll] = None
        self._waiting_now.set()
        try:
            yield poll
        finally:
            self._shares.give(holder)
            self._leave(poll)

    def _leave(self, poll: Poll) -> None:
        run = poll.wanted.run
        del self._lines[run][poll]
        if not self._lines[run]:
            del self._lines[run]
        if not self._lines:
            self._waiting_now.clear()
        self._wake(run, poll.rung + poll.owes)  # the batch that it was woken for is still there

    def ring(self, run: str) -> None:
        """A batch of the run has become ready."""
        self._call(self._wake, run, 1)

    def look_now(self) -> None:
        """Batches may have become ready, or may be leased again."""
        self._call(self._asked.set)

    def wake_all(self) -> None:
        self._call(self._wake_all)

    def _call(self, act: Callable[..., object], *arguments: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(act, *arguments)

    async def watch(self, queue: Queue) -> None:
        """Looks at the store while requests wait, in one transaction for all, and wakes those that it has batches for.

        The same transaction notes that the lineages that wait are present.
        """
        self._loop = asyncio.get_running_loop()
        thread = CapacityLimiter(1)
        alive_due = 0.0
        while True:
            await self._waiting_now.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._asked.wait()
            self._asked.clear()
            waiting = self._waiting()
            now = self._loop.time()
            alive = self._alive() if now >= alive_due else frozenset()
            alive_due = now + ALIVE_SECONDS if alive else alive_due
            with self.background.turn():
                try:
                    self._grant(await to_thread.run_sync(queue.count_leasable, waiting, alive, limiter=thread))
                except Exception as error:
                    self._wake_all()  # each request meets the error itself, and answers it
                    if not isinstance(error, StorageBroken | StorageFull):
                        raise
            await asyncio.sleep(self.background.pause)

    def _waiting(self) -> Mapping[Wanted, int]:
        return Counter(poll.wanted for line in self._lines.values() for poll in line if not poll.rung)

    def _alive(self) -> frozenset[tuple[str, str]]:
        wanted = {poll.wanted for line in self._lines.values() for poll in line}
        return frozenset((each.run, each.lineage) for each in wanted if each.run is not None)

    def _grant(self, ready: Mapping[Wanted, int]) -> None:
        left = Counter(ready)
        for run in dict.fromkeys(wanted.run for wanted in ready):
            for poll in self._lines.get(run, ()):
                if left[poll.wanted] > 0 and not poll.rung:
                    left[poll.wanted] -= 1
                    poll.ring()

    def _wake(self, run: str | None, batches: int) -> None:
        """Wakes as many requests as there are batches, of those that want this run's or any."""
        lines = (self._lines.get(wanted, ()) for wanted in {run, None})
        asleep = (poll for poll in merge(*lines, key=attrgetter("arrival")) if not poll.rung)
        for poll in itertools.islice(asleep, batches):
            poll.ring()

    def _wake_all(self) -> None:
        for line in self._lines.values():
            for poll in line:
                poll.ring()
