"""The frozen reference model at work: batches in, the same batches with `ref_logps` out, on a thread of its own."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import structlog
import torch

from ref_server.payloads import read_payload
from ref_server.queue.interface import Claim, Queue, StorageBroken, StorageFull
from ref_server.reference import Busy, ScoringTotals
from shared.batch import TokenGroup
from shared.logprobs import LogprobForward

log = structlog.get_logger()

# An idle loop looks at the queue this often, in seconds: another server that shares the queue does not ring.
IDLE_SECONDS = 0.5


class Scorer:
    """A frozen model's log-probs."""

    def __init__(self, forward: LogprobForward) -> None:
        self._forward = forward

    def logps(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> list[np.ndarray]:
        """Groups -> float32 (C,) each, computed in one forward."""
        with torch.inference_mode():
            flat = self._forward(groups, temperatures).float().cpu().numpy()
        ends = np.cumsum([len(group.completion_ids) for group in groups])[:-1]
        return np.split(flat, ends)


@dataclass(frozen=True)
class _Direct:
    """A group that somebody waits for, and where its log-probs go."""

    group: TokenGroup
    temperature: float
    answer: Future[np.ndarray]


@dataclass(frozen=True)
class _Verdict:
    """What became of a claimed batch, and how the queue is told."""

    id: str
    tell: Callable[[], object]


class ScoringLoop:
    """Scores direct requests first, then what is queued, several small batches to a forward.

    A batch that cannot be scored goes back to the queue, or to the dead; it never stops the loop. What a full or broken
    store does not take is kept and offered again, while direct requests go on. on_ready is called from the loop's
    thread whenever batches have become ready.
    """

    def __init__(
        self,
        scorer: Scorer,
        queue: Queue,
        *,
        reference_version: str,
        tokens_per_forward: int,
        on_ready: Callable[[], None],
        max_direct: int = 64,
    ) -> None:
        self._scorer = scorer
        self._queue = queue
        self._reference_version = reference_version
        self._tokens_per_forward = tokens_per_forward
        self._on_ready = on_ready
        self._max_direct = max_direct
        self._direct: deque[_Direct] = deque()
        self._unsaved: deque[_Verdict] = deque()
        self._work = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)
        self.totals = ScoringTotals()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finishes the forward in hand and ends the thread."""
        self._stopping = True
        self._work.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def ring(self) -> None:
        """Says that there is work. Call it after an upload was admitted."""
        self._work.set()

    def submit(self, group: TokenGroup, temperature: float) -> "Future[np.ndarray]":
        """Scores a group ahead of the queue: a future of its float32 (C,) log-probs. Raises Busy."""
        if len(self._direct) >= self._max_direct:
            raise Busy(f"{self._max_direct} direct requests wait already")
        request = _Direct(group, temperature, Future())
        self._direct.append(request)
        self._work.set()
        return request.answer

    def _run(self) -> None:
        while not self._stopping:
            self._work.clear()
            if not self._step():
                started = time.monotonic()
                self._work.wait(IDLE_SECONDS)
                self.totals.waiting_seconds += time.monotonic() - started

    def _step(self) -> bool:
        """Scores what waits; False when there was nothing."""
        if self._direct:
            self._answer(self._direct.popleft())
            return True
        try:
            self._save()
            claims = self._queue.claim(self._tokens_per_forward)
            started = time.monotonic()
            self._score_claims(claims)
            self.totals.working_seconds += time.monotonic() - started
            self._save()
        except Exception as error:  # a full or broken store is waited for, and /readyz tells
            log.error("the queue cannot be used", error=repr(error))
            return False
        return bool(claims)

    def _save(self) -> None:
        """Tells the queue what became of claimed batches. Raises StorageFull, StorageBroken: what is left waits."""
        saved = False
        while self._unsaved:
            verdict = self._unsaved[0]
            try:
                verdict.tell()
            except (StorageFull, StorageBroken):
                raise
            except Exception as error:  # dropped meanwhile, say: not a reason to keep others waiting
                log.error("the queue does not take back a batch", id=verdict.id, exc_info=error)
            self._unsaved.popleft()
            saved = True
        if saved:
            self._on_ready()

    def _answer(self, request: _Direct) -> None:
        if not request.answer.set_running_or_notify_cancel():
            return
        started = time.monotonic()
        try:
            request.answer.set_result(self._scorer.logps([request.group], [request.temperature])[0])
        except Exception as error:  # belongs to whoever asked
            request.answer.set_exception(error)
        self.totals.working_seconds += time.monotonic() - started

    def _score_claims(self, claims: list[Claim]) -> None:
        """One forward for all. If it fails, one for each, so that only the batch at fault counts a failure."""
        if not claims:
            return
        try:
            self._score_together(claims)
        except Exception as error:
            if len(claims) == 1:
                self._set_aside(claims[0], error)
                return
            for claim in claims:
                self._score_claims([claim])

    def _score_together(self, claims: list[Claim]) -> None:
        payloads = [read_payload(claim.body) for claim in claims]
        logps = iter(
            self._scorer.logps(
                [group for payload in payloads for group in payload.groups],
                [temperature for payload in payloads for temperature in payload.temperatures],
            )
        )
        scored = [
            payload.scored(list(islice(logps, len(payload.groups))), self._reference_version) for payload in payloads
        ]
        for claim, payload, body in zip(claims, payloads, scored, strict=True):
            self._unsaved.append(_Verdict(claim.id, partial(self._queue.complete, claim.id, body)))
            self.totals.batches += 1
            self.totals.tokens += sum(group.tokens for group in payload.groups)

    def _set_aside(self, claim: Claim, error: Exception) -> None:
        self.totals.errors += 1
        log.error("a batch could not be scored", id=claim.id, attempt=claim.attempts + 1, exc_info=error)
        reason = f"{type(error).__name__}: {error}"[:1000]
        self._unsaved.append(_Verdict(claim.id, partial(self._queue.fail, claim.id, reason)))
