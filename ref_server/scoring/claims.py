"""The queue as the scoring loop uses it: it claims batches, and stores their scores or their failure."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from ref_server.metrics.totals import DeviceTotals
from ref_server.queue.errors import StorageBroken, StorageFull, WrongState
from ref_server.queue.queue import Queue
from ref_server.queue.records import Claim
from ref_server.scoring.payloads import Payload, read_payload
from ref_server.scoring.reference import Scores
from shared.batch import TokenGroup

T = TypeVar("T")

log = structlog.get_logger()

# A store that fails is not asked again for this many seconds, or for as long as the failed call took, if that is
# longer: direct requests need no store, and should not wait for it.
REST_SECONDS = 0.5


@dataclass(frozen=True, eq=False)
class Queued:
    """A `Job` from the queue."""

    claim: Claim
    payload: Payload
    claimed_at: float
    claims: "Claims"

    @property
    def groups(self) -> Sequence[TokenGroup]:
        return self.payload.groups

    @property
    def temperatures(self) -> Sequence[float]:
        return self.payload.temperatures

    @property
    def interrupted(self) -> bool:
        """Whether a server ended while it scored this batch; perhaps the batch was the cause."""
        return self.claim.interruptions > 0

    def scored(self, scores: Scores) -> Callable[[], None]:
        return partial(self.claims.complete, self, self.payload.scored(scores))

    def fail(self, error: Exception) -> None:
        self.claims.set_aside(self.claim, error)


@dataclass(frozen=True)
class _Result:
    """A claimed batch that was scored or failed. save: stores that in the queue. saved: called afterwards."""

    id: str
    save: Callable[[], object]
    saved: Callable[[], object]


class Claims:
    """Keeps results that a full or broken store does not take, and offers them again.

    on_ready: called whenever batches have become ready.
    """

    def __init__(self, queue: Queue, totals: DeviceTotals, on_ready: Callable[[], None]) -> None:
        self._queue = queue
        self._totals = totals
        self._on_ready = on_ready
        self._unsaved: deque[_Result] = deque()
        self._paused_until = 0.0

    def take(self, max_tokens: int, reference_version: int) -> list[Queued]:
        """Claims batches for weights of this version, and leaves out those that cannot be read.

        Nothing while the store cannot be used.
        """
        jobs: list[Queued] = []
        while not jobs and (claimed := self._ask_store(partial(self._claim, max_tokens, reference_version))):
            now = time.monotonic()
            jobs = [job for claim in claimed if (job := self._read(claim, now)) is not None]
        return jobs

    def save(self) -> None:
        """Stores the results of claimed batches. Those that the store does not take wait."""
        self._ask_store(self._save)

    def complete(self, job: Queued, body: bytes) -> None:
        self._totals.batches.inc()
        self._totals.tokens.inc(sum(group.tokens for group in job.groups))
        save = partial(self._queue.complete, job.claim.id, body)
        self._unsaved.append(_Result(job.claim.id, save, partial(self._note_saved, job.claimed_at)))

    def set_aside(self, claim: Claim, error: Exception) -> None:
        self._totals.errors.inc()
        log.error("a batch could not be scored", id=claim.id, attempt=claim.attempts + 1, exc_info=error)
        reason = f"{type(error).__name__}: {error}"[:1000]
        self._unsaved.append(_Result(claim.id, partial(self._queue.fail, claim.id, reason), lambda: None))

    def _claim(self, max_tokens: int, reference_version: int) -> list[Claim]:
        self._save()
        return self._queue.claim(max_tokens, reference_version)

    def _read(self, claim: Claim, claimed_at: float) -> Queued | None:
        try:
            return Queued(claim, read_payload(claim.run, claim.body), claimed_at, self)
        except Exception as error:  # a damaged body can raise anything
            self.set_aside(claim, error)
            return None

    def _ask_store(self, ask: Callable[[], T]) -> T | None:
        """What the call returns; None while the store cannot be used, as /readyz says."""
        started = time.monotonic()
        if started < self._paused_until:
            return None
        try:
            return ask()
        except (StorageFull, StorageBroken) as error:
            log.error("the queue cannot be used", error=str(error))
            now = time.monotonic()
            self._paused_until = now + max(REST_SECONDS, now - started)
            return None

    def _save(self) -> None:
        """Raises StorageFull, StorageBroken; results that are not saved by then wait."""
        saved = False
        try:
            while self._unsaved:
                self._save_one(self._unsaved[0])
                self._unsaved.popleft()
                saved = True
        finally:
            if saved:
                self._on_ready()

    def _save_one(self, result: _Result) -> None:
        try:
            result.save()
        except (KeyError, WrongState) as error:  # it was dropped meanwhile, for example; the others go on
            log.error("the queue refuses the result of a batch", id=result.id, error=repr(error))
        else:
            result.saved()

    def _note_saved(self, claimed_at: float) -> None:
        self._totals.batch_seconds.observe(time.monotonic() - claimed_at)
