"""The scoring loop: batches in, the same batches with their log-probs out, on a thread of its own."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

import structlog

from ref_server.queue.interface import Claim, Queue, StorageBroken, StorageFull, WrongState
from ref_server.scoring.errands import Errands
from ref_server.scoring.payloads import read_payload
from ref_server.scoring.reference import Busy, DeviceLost, Reference, Scores, ScoringTotals
from shared.batch import TokenGroup

T = TypeVar("T")

log = structlog.get_logger()

# An idle loop looks at the queue this often, in seconds: another server that shares the queue does not ring.
IDLE_SECONDS = 0.5
# After a forward that did not fit, claims grow back by this part of the full budget at a time: what took the memory may
# be gone (another model while the reference was replaced), and too many tokens cost but a forward that is done again.
_REGROWTH = 16


@dataclass(frozen=True)
class _Verdict:
    """What became of a claimed batch, how the queue is told, and what follows once it has taken it."""

    id: str
    tell: Callable[[], object]
    told: Callable[[], object]


class ScoringLoop:
    """Scores direct requests first, then what is queued, several small batches to a forward.

    A batch that cannot be scored goes back to the queue, or to the dead; it never stops the loop. What a full or broken
    store does not take is kept and offered again, while direct requests go on. A lost device ends the loop, since every
    later batch would fail for a fault that is not its own, and so does a bug: what it has claimed stays claimed, and is
    queued again by the next process. on_ready is called from the loop's thread whenever batches have become ready.
    """

    def __init__(
        self,
        reference: Reference,
        queue: Queue,
        *,
        tokens_per_forward: int,
        on_ready: Callable[[], None],
        max_direct: int = 64,
    ) -> None:
        self._reference = reference
        self._queue = queue
        self._tokens_per_forward = tokens_per_forward
        self._budget = tokens_per_forward
        self._on_ready = on_ready
        self._max_direct = max_direct
        self._errands = Errands(fatal=DeviceLost)
        self._unsaved: deque[_Verdict] = deque()
        self._work = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)
        self.failed = False
        self.totals = ScoringTotals()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._errands.close()
        self._work.set()

    def join(self) -> None:
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def ring(self) -> None:
        self._work.set()

    def submit(self, group: TokenGroup, temperature: float) -> "Future[Scores]":
        if len(self._errands) >= self._max_direct:
            raise Busy(f"{self._max_direct} direct requests wait already")
        return self._ask(partial(self._score_directly, group, temperature))

    def replace(self, reference: Reference) -> "Future[None]":
        return self._ask(partial(setattr, self, "_reference", reference))

    def _ask(self, work: Callable[[], T]) -> "Future[T]":
        answer = self._errands.ask(work)
        self._work.set()
        return answer

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._work.clear()
                if not self._step():
                    started = time.monotonic()
                    self._work.wait(IDLE_SECONDS)
                    self.totals.waiting_seconds += time.monotonic() - started
            while self._errands.run_next():
                pass
        except BaseException:  # whatever it is, this thread has nobody else to tell
            self.failed = True
            log.critical("the scoring loop has ended by an error", exc_info=True)
            self._errands.refuse_all()

    def _step(self) -> bool:
        """Does what waits; False when there was nothing."""
        if self._errands.run_next():
            return True
        try:
            self._save()
            claims = self._queue.claim(self._budget)
            self._score_claims(claims, time.monotonic())
            self._save()
        except (StorageFull, StorageBroken) as error:  # waited for, and /readyz tells
            log.error("the queue cannot be used", error=str(error))
            return False
        return bool(claims)

    def _save(self) -> None:
        """Tells the queue what became of claimed batches. Raises StorageFull, StorageBroken: what is left waits."""
        saved = False
        while self._unsaved:
            verdict = self._unsaved[0]
            try:
                verdict.tell()
            except (KeyError, WrongState) as error:  # dropped meanwhile, say: not a reason to keep others waiting
                log.error("the queue does not take back a batch", id=verdict.id, error=repr(error))
            else:
                verdict.told()
            self._unsaved.popleft()
            saved = True
        if saved:
            self._on_ready()

    def _score_claims(self, claims: list[Claim], claimed_at: float) -> None:
        """One forward for all. If it fails, one for each, so that only the batch at fault counts a failure."""
        if not claims:
            return
        try:
            self._score_together(claims, claimed_at)
        except DeviceLost:
            raise
        except Exception as error:
            if len(claims) == 1:
                self._set_aside(claims[0], error)
                return
            for claim in claims:
                self._score_claims([claim], claimed_at)

    def _score_together(self, claims: list[Claim], claimed_at: float) -> None:
        payloads = [read_payload(claim.body) for claim in claims]
        scores = self._score(
            [group for payload in payloads for group in payload.groups],
            [temperature for payload in payloads for temperature in payload.temperatures],
        )
        logps, version = iter(scores.logps), str(scores.reference_version)
        bodies = [payload.scored(list(islice(logps, len(payload.groups))), version) for payload in payloads]
        for claim, payload, body in zip(claims, payloads, bodies, strict=True):
            tell = partial(self._queue.complete, claim.id, body)
            self._unsaved.append(_Verdict(claim.id, tell, partial(self._note_saved, claimed_at)))
            self.totals.batches += 1
            self.totals.tokens += sum(group.tokens for group in payload.groups)
        self._learn(len(claims), scores.splits)

    def _note_saved(self, claimed_at: float) -> None:
        self.totals.batch_seconds.observe(time.monotonic() - claimed_at)

    def _score_directly(self, group: TokenGroup, temperature: float) -> Scores:
        scores = self._score([group], [temperature])
        self.totals.direct_tokens += group.tokens
        return scores

    def _score(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Scores:
        started = time.monotonic()
        try:
            scores = self._reference.score(groups, temperatures)
        finally:
            seconds = time.monotonic() - started
            self.totals.working_seconds += seconds
            self.totals.forward_seconds.observe(seconds)
        self.totals.splits += scores.splits
        return scores

    def _learn(self, claims: int, splits: int) -> None:
        """Fewer tokens at a time after several batches did not fit; one that is too large alone says nothing of it."""
        if not splits:
            self._budget = min(self._tokens_per_forward, self._budget + self._tokens_per_forward // _REGROWTH + 1)
        elif claims > 1:
            self._budget = max(1, self._budget // 2)

    def _set_aside(self, claim: Claim, error: Exception) -> None:
        self.totals.errors += 1
        log.error("a batch could not be scored", id=claim.id, attempt=claim.attempts + 1, exc_info=error)
        reason = f"{type(error).__name__}: {error}"[:1000]
        self._unsaved.append(_Verdict(claim.id, partial(self._queue.fail, claim.id, reason), lambda: None))
