"""A scoring loop: claims batches, packs them with direct requests, scores them and saves the scores, on its thread."""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import structlog

from ref_server.metrics import DeviceTotals
from ref_server.queue.errors import StorageBroken, StorageFull, WrongState
from ref_server.queue.queue import Queue
from ref_server.queue.records import Claim
from ref_server.scoring.jobs import (
    ClaimedBatch,
    DirectRequest,
    DirectRequests,
    Job,
    Replacement,
    ScoringGate,
    read_payload,
    tokens_of,
)
from ref_server.scoring.reference import DeviceLost, Replica, Scores
from shared.batch import TokenGroup

T = TypeVar("T")

log = structlog.get_logger()

# An idle loop looks at the queue this often, in seconds: another server on the same queue does not wake it.
IDLE_SECONDS = 0.5
# The queue's share of each forward, however many direct requests there are.
_QUEUE_SHARE = 1 / 4
# A store that fails is not called for this many seconds, or for as long as the failed call took, if that is longer:
# direct requests need no store, and should not wait for it.
REST_SECONDS = 0.5
# After a forward that did not fit, the budget grows back by this fraction at each forward that fits. The memory may be
# free again (a second model while the reference was replaced), and a budget too large costs only a repeated forward.
_REGROWTH = 1 / 16
# Direct requests that may wait at once.
_MOST_DIRECT = 64


class ScoringLoop:
    """Packs direct requests and queued batches together, up to tokens_per_forward tokens a forward.

    Direct requests go first: they fill up to three quarters of the next forward, queued batches the rest. At least one
    batch goes with each step, in a separate forward if it does not fit. So neither waits long: a direct request waits
    for the current forward and for earlier requests, the queue for one forward of direct requests.

    tokens_per_forward ignores the cost of attention: several groups have no more pairs of tokens than one row of that
    length. A single batch above it is scored by itself. Images count by their placeholders, which are tokens of the
    prompt.

    If a job cannot be scored, no other job fails: a direct request gets the error, a batch is queued again or dead. A
    lost device ends the loop, since every later batch would fail, too; so does a bug. Claimed batches then stay
    claimed, and the next process queues them again. on_ready is called from the loop's thread whenever batches have
    become ready.
    """

    def __init__(
        self,
        replica: Replica,
        queue: Queue,
        totals: DeviceTotals,
        gate: ScoringGate,
        *,
        tokens_per_forward: int,
        on_ready: Callable[[], None],
    ) -> None:
        self.failed = False
        self._totals = totals
        self._gate = gate
        self._replica = replica
        self._requests = DirectRequests()
        self._claims = _Claims(queue, totals, on_ready)
        self._most_tokens = tokens_per_forward
        self._budget = tokens_per_forward
        self._wake = threading.Event()
        self._stopping = False
        self._tokens_in_hand = 0
        self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._requests.close()
        self._wake.set()

    def join(self) -> None:
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def load(self) -> tuple[int, int]:
        """Direct requests that wait, and tokens that are being scored. Any thread may ask."""
        return len(self._requests), self._tokens_in_hand

    def ring(self) -> None:
        self._wake.set()

    def submit(self, groups: Sequence[TokenGroup], temperature: float, *, likeliest: bool = False) -> "Future[Scores]":
        request = DirectRequest(groups, temperature, likeliest, self._totals)
        self._requests.add(request, most=_MOST_DIRECT)
        self._wake.set()
        return request.answer

    def replace(self, replica: Replica) -> "Future[None]":
        replacement = Replacement(replica)
        self._requests.add(replacement, most=sys.maxsize)
        self._wake.set()
        return replacement.answer

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                if not self._step():
                    started = time.monotonic()
                    self._wake.wait(IDLE_SECONDS)
                    self._totals.waiting_seconds.inc(time.monotonic() - started)
            while self._step():
                pass
        except BaseException:  # nobody else would see an error of this thread
            self.failed = True
            self._requests.refuse_all()
            log.critical("the scoring loop has ended with an error", exc_info=True)

    def _step(self) -> bool:
        """Claims, packs, scores and saves some of the waiting jobs. False when nothing is left."""
        with ExitStack() as scoring:
            with self._gate.claiming:
                while replacement := self._requests.next_replacement():
                    self._replica = replacement.replica
                    replacement.answer.set_result(None)
                share = int(self._budget * _QUEUE_SHARE)
                direct = self._requests.take(self._budget - share)
                batches = self._claim(max(share, self._budget - tokens_of(direct)))
                self._tokens_in_hand = tokens_of(direct) + tokens_of(batches)
                # A server ended while it scored these batches: perhaps one of them was the cause.
                if suspects := [batch for batch in batches if batch.claim.interruptions]:
                    self._gate.wait_until_alone()
                    self._score(self._cut(suspects))
                scoring.enter_context(self._gate.scoring())
            self._score(self._pack(direct, [batch for batch in batches if not batch.claim.interruptions]))
        self._tokens_in_hand = 0
        return bool(direct or batches or self._requests)

    def _claim(self, max_tokens: int) -> list[ClaimedBatch]:
        return [] if self._stopping else self._claims.take(max_tokens, self._replica.version)

    def _pack(self, direct: Sequence[DirectRequest], batches: Sequence[ClaimedBatch]) -> Sequence[Sequence[Job]]:
        """The jobs of one forward, or of several if one would be too large."""
        if tokens_of(direct) + tokens_of(batches) > self._budget:
            return [direct, *self._cut(batches)]
        return [[*direct, *batches]]

    def _cut(self, batches: Sequence[ClaimedBatch]) -> list[list[ClaimedBatch]]:
        """Batches within the budget, in order: they were claimed by the tokens of their prompts, and teachers' prompts
        may be longer."""
        forwards: list[list[ClaimedBatch]] = []
        for batch in batches:
            if not forwards or tokens_of([*forwards[-1], batch]) > self._budget:
                forwards.append([])
            forwards[-1].append(batch)
        return forwards

    def _score(self, forwards: Sequence[Sequence[Job]]) -> None:
        for jobs in forwards:
            self._score_together(jobs)
            self._claims.save()

    def _score_together(self, jobs: Sequence[Job]) -> None:
        """One forward for all jobs. Jobs without scores are split in two and tried again, until only the faulty job
        fails; scored jobs are not repeated. Raises DeviceLost."""
        if not jobs:
            return
        failed, error = self._try(jobs)
        if error is not None and len(jobs) == 1:
            jobs[0].fail(error)
        elif failed:
            del error  # its traceback keeps the forward's memory
            cut = len(failed) // 2
            self._score_together(failed[:cut])
            self._score_together(failed[cut:])

    def _try(self, jobs: Sequence[Job]) -> tuple[Sequence[Job], Exception | None]:
        """The jobs that got no scores, and an error of one of them."""
        try:
            scores = self._forward(jobs)
        except DeviceLost:
            raise
        except Exception as error:  # one job may be at fault
            return jobs, error
        self._adapt_budget(len(jobs), scores.splits)
        return _deliver(jobs, list(scores.shares(len(job.groups) for job in jobs)))

    def _adapt_budget(self, jobs: int, splits: int) -> None:
        """A single job that does not fit says nothing about several."""
        if not splits:
            self._budget = min(self._most_tokens, self._budget + int(self._most_tokens * _REGROWTH) + 1)
        elif jobs > 1:
            self._budget = max(1, self._budget // 2)

    def _forward(self, jobs: Sequence[Job]) -> Scores:
        groups = [group for job in jobs for group in job.groups]
        temperatures = [temperature for job in jobs for temperature in job.temperatures]
        started = time.monotonic()
        try:
            scores = self._replica.score(groups, temperatures, likeliest=any(job.likeliest for job in jobs))
        finally:
            seconds = time.monotonic() - started
            self._totals.working_seconds.inc(seconds)
            self._totals.forward_seconds.observe(seconds)
        self._totals.splits.inc(scores.splits)
        return scores


def _deliver(jobs: Sequence[Job], shares: Sequence[Scores]) -> tuple[list[Job], Exception | None]:
    """Delivers the scores. Returns the jobs whose scores are not finite, for another try: NaN may have spread from
    another job of the same forward."""
    failed: list[Job] = []
    last: Exception | None = None
    for job, share in zip(jobs, shares, strict=True):
        try:
            deliver = job.scored(share)
        except Exception as error:
            failed.append(job)
            last = error
        else:
            deliver()
    return failed, last


class _Claims:
    """Claims batches, and stores their scores or their failure.

    Results that a full or broken store does not take are kept, and offered again. on_ready: called whenever batches
    have become ready.
    """

    def __init__(self, queue: Queue, totals: DeviceTotals, on_ready: Callable[[], None]) -> None:
        self._queue = queue
        self._totals = totals
        self._on_ready = on_ready
        # Ids of claimed batches, what stores their result, and when they were claimed; None for a failure.
        self._unsaved: deque[tuple[str, Callable[[], object], float | None]] = deque()
        self._paused_until = 0.0

    def take(self, max_tokens: int, reference_version: int) -> list[ClaimedBatch]:
        """Claims batches for weights of this version, and leaves out those that cannot be read.

        Nothing while the store cannot be used.
        """
        batches: list[ClaimedBatch] = []
        while not batches and (claimed := self._call_store(partial(self._claim, max_tokens, reference_version))):
            now = time.monotonic()
            batches = [batch for claim in claimed if (batch := self._read(claim, now)) is not None]
        return batches

    def save(self) -> None:
        """Stores the results of claimed batches. Those that the store does not take wait."""
        self._call_store(self._save)

    def _complete(self, batch: ClaimedBatch, scores: bytes) -> None:
        self._totals.batches.inc()
        self._totals.tokens.inc(sum(group.tokens for group in batch.groups))
        save = partial(self._queue.complete, batch.claim.id, scores)
        self._unsaved.append((batch.claim.id, save, batch.claimed_at))

    def _give_up(self, claim: Claim, error: Exception) -> None:
        self._totals.errors.inc()
        log.error("a batch could not be scored", id=claim.id, attempt=claim.attempts + 1, exc_info=error)
        reason = f"{type(error).__name__}: {error}"[:1000]
        self._unsaved.append((claim.id, partial(self._queue.fail, claim.id, reason), None))

    def _claim(self, max_tokens: int, reference_version: int) -> list[Claim]:
        self._save()
        return self._queue.claim(max_tokens, reference_version)

    def _read(self, claim: Claim, claimed_at: float) -> ClaimedBatch | None:
        try:
            groups, temperatures = read_payload(claim.run, claim.body)
        except Exception as error:  # a damaged body can raise anything
            self._give_up(claim, error)
            return None
        return ClaimedBatch(claim, claimed_at, self._complete, self._give_up, groups, temperatures)

    def _call_store(self, call: Callable[[], T]) -> T | None:
        """What the call returns; None while the store cannot be used, as /readyz says."""
        started = time.monotonic()
        if started < self._paused_until:
            return None
        try:
            return call()
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
                self._save_result(*self._unsaved[0])
                self._unsaved.popleft()
                saved = True
        finally:
            if saved:
                self._on_ready()

    def _save_result(self, id: str, save: Callable[[], object], claimed_at: float | None) -> None:
        try:
            save()
        except (KeyError, WrongState) as error:  # it was dropped meanwhile, for example; the others go on
            log.error("the queue refuses the result of a batch", id=id, error=repr(error))
        else:
            if claimed_at is not None:
                self._totals.batch_seconds.observe(time.monotonic() - claimed_at)
