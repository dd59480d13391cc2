"""Published weights for the routes: waits for the next publication, and keeps the one that is the reference."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import structlog
from anyio import to_thread

from ref_server.access.shares import Shares
from ref_server.config import ServeConfig
from ref_server.queue.errors import StorageBroken, StorageFull
from ref_server.queue.queue import Queue
from ref_server.scoring.reference import Busy
from ref_server.weights.catalog import FOLDER, Published, version_of_snapshot
from ref_server.weights.store import WeightsStore
from shared.api import WeightsFile, WeightsName

log = structlog.get_logger()

# How often a request that waits looks by itself, in seconds: servers may share the store, and its client may have left.
LOOK_SECONDS = 2.0
MAX_POLLS = 4096


class ServedWeights:
    """check_open: raises NotReady while the server drains."""

    def __init__(self, config: ServeConfig, queue: Queue, check_open: Callable[[], None]) -> None:
        unused_seconds = config.queue.max_waiting_days * 86_400
        self.store = WeightsStore(
            config.data_dir / FOLDER,
            min_free=config.queue.min_free,
            most=config.max_weights,
            most_of_token=config.max_weights_per_token,
            unused_seconds=unused_seconds,
        )
        self._queue = queue
        self.check_open = check_open
        self._polls = Shares(MAX_POLLS)
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def commit(self, name: WeightsName, files: Mapping[str, WeightsFile], words: Mapping[str, Any]) -> Published:
        """As `WeightsStore.commit`; then wakes the waiting requests, and removes old versions."""
        self.check_open()
        published = self.store.commit(name, files, words)
        self.wake()
        try:
            self.tidy()
        except (StorageBroken, StorageFull) as error:  # the version is committed all the same
            log.warning("old weights cannot be removed", error=str(error))
        return published

    def tidy(self) -> bool:
        """Removes what is old. False: nothing is left to do."""
        wanted = self._queue.wanted_reference()
        pinned = version_of_snapshot(wanted.snapshot if wanted else None)
        self.store.tidy([pinned] if pinned else [])
        return False

    def wake(self) -> None:
        """Wakes the waiting requests. Any thread may call it."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def newest(
        self,
        run: str,
        lineage: str | None,
        after: tuple[int, int],
        wait_seconds: float,
        holder: str,
        is_gone: Callable[[], bool],
    ) -> Published | None:
        """The newest of a lineage, or of the one that committed last, once it is newer than `after` (epoch, version)
        or committed again.

        None when there is none in time, or when the client has left. holder: the client, which may wait in as many
        places as are free. Raises Busy, NotReady.
        """
        self._loop = asyncio.get_running_loop()
        deadline = time.monotonic() + wait_seconds
        first: list[Published | None] = []
        with self._polls.hold(holder) as take:
            if not take(1):
                raise Busy(f"too many requests of {holder} wait for weights already")
            while True:
                self.check_open()
                changed = self._changed
                newest = await to_thread.run_sync(self.store.newest, run, lineage)
                left = deadline - time.monotonic()
                first = first or [newest]
                if newest is not None and (newest.name.order > after or newest != first[0]):
                    return newest
                if left <= 0 or is_gone():
                    return None
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, LOOK_SECONDS)):
                        await changed.wait()

    @contextmanager
    def reading(self, snapshot: str | None) -> Iterator[None]:
        """While a version is loaded as the reference it stays. Snapshots of other kinds are not of this store."""
        version = version_of_snapshot(snapshot)
        if version is None:
            yield
        else:
            with self.store.readers.reading(version):
                yield
