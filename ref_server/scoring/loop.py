"""A scoring loop: takes batches, computes their log-probs and stores them, on a thread of its own."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack

import structlog

from ref_server.metrics.totals import DeviceTotals
from ref_server.queue.queue import Queue
from ref_server.scoring.claims import Claims, Queued
from ref_server.scoring.company import Company
from ref_server.scoring.direct import Direct, Line, Replacement
from ref_server.scoring.forwards import Budget, Forwards, Job, tokens_of
from ref_server.scoring.reference import Replica, Scores
from shared.batch import TokenGroup

log = structlog.get_logger()

# An idle loop looks at the queue this often, in seconds: another server on the same queue does not wake it.
IDLE_SECONDS = 0.5
# The queue's share of each forward, however many direct requests there are.
_QUEUE_SHARE = 1 / 4


class ScoringLoop:
    """Packs direct requests and queued batches together, up to tokens_per_forward tokens a forward.

    Direct requests go first: they fill up to three quarters of the next forward, queued batches the rest. At least one
    batch goes with each step, in a forward of its own if it does not fit. So neither waits long: a direct request waits
    for the current forward and for earlier requests, the queue for one forward of direct requests.

    A job that cannot be scored fails alone: a direct request gets the error, a batch is queued again or dead. A lost
    device ends the loop, since every later batch would fail, too; so does a bug. Claimed batches then stay claimed, and
    the next process queues them again. on_ready is called from the loop's thread whenever batches have become ready.
    """

    def __init__(
        self,
        replica: Replica,
        queue: Queue,
        totals: DeviceTotals,
        company: Company,
        *,
        tokens_per_forward: int,
        on_ready: Callable[[], None],
        max_direct: int = 64,
    ) -> None:
        self.failed = False
        self._totals = totals
        self._company = company
        self._replica = replica
        self._max_direct = max_direct
        self._line = Line()
        self._claims = Claims(queue, totals, on_ready)
        self._budget = Budget(tokens_per_forward)
        self._forwards = Forwards(self._budget, totals)
        self._work = threading.Event()
        self._stopping = False
        self._tokens_in_hand = 0
        self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._line.close()
        self._work.set()

    def join(self) -> None:
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def load(self) -> tuple[int, int]:
        """Direct requests that wait, and tokens that are being scored. Any thread may ask."""
        return len(self._line), self._tokens_in_hand

    def ring(self) -> None:
        self._work.set()

    def submit(self, group: TokenGroup, temperature: float) -> "Future[Scores]":
        direct = Direct(group, temperature, self._totals)
        self._line.join(direct, most=self._max_direct)
        self._work.set()
        return direct.answer

    def replace(self, replica: Replica) -> "Future[None]":
        replacement = Replacement(replica)
        self._line.join(replacement, most=sys.maxsize)
        self._work.set()
        return replacement.answer

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._work.clear()
                if not self._step():
                    started = time.monotonic()
                    self._work.wait(IDLE_SECONDS)
                    self._totals.waiting_seconds.inc(time.monotonic() - started)
            while self._step():
                pass
        except BaseException:  # nobody else would see an error of this thread
            self.failed = True
            log.critical("the scoring loop has ended with an error", exc_info=True)
            self._line.refuse_all()

    def _step(self) -> bool:
        """Scores some of the waiting jobs. False when nothing is left."""
        with ExitStack() as working:
            with self._company.claiming:
                self._replace()
                share = int(self._budget.tokens * _QUEUE_SHARE)
                direct = self._line.take(self._budget.tokens - share)
                queued = self._claim(max(share, self._budget.tokens - tokens_of(direct)))
                self._tokens_in_hand = tokens_of(direct) + tokens_of(queued)
                if suspects := [job for job in queued if job.interrupted]:
                    self._company.wait_until_alone()
                    self._score([suspects])
                working.enter_context(self._company.working())
            self._score(self._packed(direct, [job for job in queued if not job.interrupted]))
        self._tokens_in_hand = 0
        return bool(direct or queued or self._line)

    def _score(self, forwards: Sequence[Sequence[Job]]) -> None:
        for jobs in forwards:
            self._forwards.score(self._replica, jobs)
            self._claims.save()

    def _replace(self) -> None:
        while replacement := self._line.next_replacement():
            self._replica = replacement.replica
            replacement.answer.set_result(None)

    def _claim(self, max_tokens: int) -> list[Queued]:
        return [] if self._stopping else self._claims.take(max_tokens, self._replica.version)

    def _packed(self, direct: Sequence[Direct], queued: Sequence[Queued]) -> Sequence[Sequence[Job]]:
        """The jobs of one forward, or of two if one would be too large."""
        if tokens_of(direct) + tokens_of(queued) > self._budget.tokens:
            return direct, queued
        return [[*direct, *queued]]
