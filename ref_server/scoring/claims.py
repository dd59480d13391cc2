"""The queue as the scoring loop uses it: batches to score come out, and what became of them goes back."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from ref_server.metrics.totals import ScoringTotals
from ref_server.queue.interface import Claim, Queue, StorageBroken, StorageFull, WrongState
from ref_server.scoring.payloads import Payload, read_payload
from ref_server.scoring.reference import Scores
from shared.batch import TokenGroup

T = TypeVar("T")

log = structlog.get_logger()

# A store that cannot be used is left alone for so many seconds, or for as long as it took to say so, if that is longer:
# direct requests need no store, and do not wait for it all the time.
REST_SECONDS = 0.5


@dataclass(frozen=True, eq=False)
class Queued:
    """A `Job` that the queue keeps."""

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
        """Whether a server has ended while it scored this, perhaps by its fault."""
        return self.claim.interruptions > 0

    def scored(self, scores: Scores) -> Callable[[], None]:
        body = self.payload.scored(scores.logps, str(scores.reference_version))
        return partial(self.claims.complete, self, body)

    def fail(self, error: Exception) -> None:
        self.claims.set_aside(self.claim, error)


@dataclass(frozen=True)
class _Verdict:
    """What became of a claimed batch, how the queue is told, and what follows once it has taken it."""

    id: str
    tell: Callable[[], object]
    told: Callable[[], object]


class Claims:
    """What a full or broken store does not take is kept and offered again.

    on_ready: called whenever batches have become ready.
    """

    def __init__(self, queue: Queue, totals: ScoringTotals, on_ready: Callable[[], None]) -> None:
        self._queue = queue
        self._totals = totals
        self._on_ready = on_ready
        self._unsaved: deque[_Verdict] = deque()
        self._rests_until = 0.0

    def take(self, max_tokens: int) -> list[Queued]:
        """What `Queue.claim` gives and can be read; nothing while the store cannot be used."""
        jobs: list[Queued] = []
        while not jobs and (claimed := self._ask_store(partial(self._claim, max_tokens))):
            now = time.monotonic()
            jobs = [job for claim in claimed if (job := self._read(claim, now)) is not None]
        return jobs

    def save(self) -> None:
        """Tells the queue what became of claimed batches; what it does not take waits."""
        self._ask_store(self._save)

    def complete(self, job: Queued, body: bytes) -> None:
        self._totals.batches.inc()
        self._totals.tokens.inc(sum(group.tokens for group in job.groups))
        tell = partial(self._queue.complete, job.claim.id, body)
        self._unsaved.append(_Verdict(job.claim.id, tell, partial(self._note_saved, job.claimed_at)))

    def set_aside(self, claim: Claim, error: Exception) -> None:
        self._totals.errors.inc()
        log.error("a batch could not be scored", id=claim.id, attempt=claim.attempts + 1, exc_info=error)
        reason = f"{type(error).__name__}: {error}"[:1000]
        self._unsaved.append(_Verdict(claim.id, partial(self._queue.fail, claim.id, reason), lambda: None))

    def _claim(self, max_tokens: int) -> list[Claim]:
        self._save()
        return self._queue.claim(max_tokens)

    def _read(self, claim: Claim, claimed_at: float) -> Queued | None:
        try:
            return Queued(claim, read_payload(claim.body), claimed_at, self)
        except Exception as error:  # a stored body may be damaged in any way
            self.set_aside(claim, error)
            return None

    def _ask_store(self, ask: Callable[[], T]) -> T | None:
        """None while the store cannot be used, which /readyz tells."""
        started = time.monotonic()
        if started < self._rests_until:
            return None
        try:
            return ask()
        except (StorageFull, StorageBroken) as error:
            log.error("the queue cannot be used", error=str(error))
            now = time.monotonic()
            self._rests_until = now + max(REST_SECONDS, now - started)
            return None

    def _save(self) -> None:
        """Raises StorageFull, StorageBroken: what is left waits."""
        saved = False
        try:
            while self._unsaved:
                self._save_one(self._unsaved[0])
                self._unsaved.popleft()
                saved = True
        finally:
            if saved:
                self._on_ready()

    def _save_one(self, verdict: _Verdict) -> None:
        try:
            verdict.tell()
        except (KeyError, WrongState) as error:  # dropped meanwhile, say: not a reason to keep others waiting
            log.error("the queue does not take back a batch", id=verdict.id, error=repr(error))
        else:
            verdict.told()

    def _note_saved(self, claimed_at: float) -> None:
        self._totals.batch_seconds.observe(time.monotonic() - claimed_at)
