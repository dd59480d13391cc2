"""Leases scored batches ahead of training, keeps the leases alive, and acks batches that a checkpoint holds."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import structlog

from policy_trainer.trainer.queue_client.ledger import Ledger, drop_done
from policy_trainer.trainer.queue_client.terms import BatchCheck, LeaseRefusals, LeaseTerms
from shared.api import MAX_LEASES, Outcome
from shared.client import Leased, LeasedOrUnusable, RefServerClient, RefServerError, UnusableBatch

log = structlog.get_logger()

# Characters of the reason for releasing a batch.
_MAX_REASON = 1000
# Length of a long poll; `close` waits until it ends.
_POLL_SECONDS = 2.0
# How long to wait for room or for a batch before checking whether the run ends.
_LOOK_SECONDS = 0.5


class BatchBuffer:
    """Holds what the step in hand still needs, and up to `ahead` batches more. Threads may share it."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._needed = 0
        self._waiting: deque[Leased] = deque()
        self._changed = threading.Condition()

    @property
    def full(self) -> bool:
        return self.lacking(timeout=0) == 0

    def hold_ahead(self, ahead: int) -> None:
        """Changes how many batches are held beyond those that the step needs."""
        with self._changed:
            self._ahead = ahead
            self._changed.notify_all()

    def lacking(self, timeout: float) -> int:
        """How many more to lease. Waits until there is room, so many seconds; 0 if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._lacking() > 0, timeout)
            return max(0, self._lacking())

    def add(self, batches: Iterable[Leased]) -> None:
        with self._changed:
            self._waiting.extend(batches)
            self._changed.notify_all()

    def put_back(self, batches: Sequence[Leased]) -> None:
        """Puts batches that were taken back to the front, in this order."""
        with self._changed:
            self._waiting.extendleft(reversed(batches))
            self._changed.notify_all()

    def take(self, needed: int, timeout: float) -> Leased | None:
        """The batch that has waited longest; None if none came within so many seconds.

        needed: how many batches the step still needs, this one included.
        """
        with self._changed:
            self._needed = needed
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._waiting, timeout):
                return None
            self._needed -= 1
            return self._waiting.popleft()

    def _lacking(self) -> int:
        return self._needed + self._ahead - len(self._waiting)


class LeaseFeed:
    """Leases what a step needs and up to `ahead` batches in advance on one thread, and sends heartbeats on another.

    ledger: tracks the leases. Batches whose ids it restored from a checkpoint are acked, never trained again.
    allowance: batches that may be leased and not yet acked. check: says which batches can be trained on; the others are
    released with an error, which counts as a delivery.

    A trained batch may be leased again: when the process was killed before its ack was answered, or when its lease was
    lost, as on a suspended machine. It is not trained again; it is acked once a checkpoint includes it.
    """

    def __init__(
        self,
        client: RefServerClient,
        terms: LeaseTerms,
        ledger: Ledger,
        check: BatchCheck,
        *,
        ahead: int,
        allowance: int,
        version: int,
    ) -> None:
        self._client = client
        self._terms = terms
        self.ledger = ledger
        self._check = check
        self._allowance = allowance
        self._ahead = ahead
        self._buffer = BatchBuffer(ahead)
        self._version = version
        self._stop = threading.Event()
        self._nothing_to_lease = threading.Event()
        self._entered = threading.Event()
        self._refusals = LeaseRefusals(terms.run)
        self._failure: Exception | None = None
        self._spare: list[Leased] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for name, work in (
                ("leases", self._fetch),
                ("heartbeat", self._send_heartbeats),
                ("old ids", partial(drop_done, client, ledger, ledger.ids(), self._stop.is_set)),
            )
        ]
        for thread in self._threads:
            thread.start()

    def enter(self, *, on_wait: Callable[[str, float], None], note: Callable[[str], None]) -> None:
        """Waits until the server leases to this run: nothing may be published before.

        note is called once if another trainer may have the run. on_wait is called with the reason and the seconds so
        far; an exception from it ends the wait. Raises RunFailed if another trainer of the run lives.
        """
        began = time.monotonic()
        noted = None
        while not self._entered.wait(0.1):
            if self._failure:
                raise self._failure
            reason = self._refusals.reason
            if reason and not noted:
                note(reason)
                noted = reason
            on_wait(reason or "the reference server to answer the first lease request", time.monotonic() - began)

    def take(self, count: int, *, version: int, on_idle: Callable[[float], None], last: bool = False) -> list[Leased]:
        """Waits for `count` batches that can be trained on at `version`, marked as started on the server.

        last: no step follows. Then nothing is leased in advance, and `finish` need not wait for a long poll to end.

        on_idle is called every half second without a batch, and after each unusable batch, with the seconds since the
        last usable one. If it raises, the wait ends and the batches taken so far are released.

        With max_lag = 0 they are in the order of their problems, each problem once: workers that are started again
        sample the same groups again.
        """
        self._version = version
        if last:
            self._buffer.hold_ahead(0)
        self._release(self._spare)  # they are too old now
        self._spare = []
        taken: list[Leased] = []
        idle_since = time.monotonic()
        try:
            while len(taken) < count:
                if self._failure:
                    raise self._failure
                leased = self._buffer.take(count - len(taken), _LOOK_SECONDS)
                if leased is None or not self._trainable(leased):
                    on_idle(time.monotonic() - idle_since)
                    continue
                idle_since = time.monotonic()
                if self._terms.max_lag == 0 and _problem(leased) in map(_problem, taken):
                    self._spare.append(leased)  # released now, it would be leased again
                    continue
                taken.append(leased)
                if len(taken) == count:
                    taken = self._start(taken)
                    if len(taken) < count:  # the place of a lost batch may be a spare's
                        self._buffer.put_back(self._spare)
                        self._spare = []
        except BaseException:
            self._release(taken)
            raise
        return sorted(taken, key=_problem) if self._terms.max_lag == 0 else taken

    def put_back(self, leased: Sequence[Leased]) -> None:
        """Returns batches that were taken but not trained. `take` gives them out again, before others."""
        self._buffer.put_back(leased)

    def refuse(self, lease: Leased | UnusableBatch, reason: str) -> None:
        """Releases a batch with an error, which counts as a delivery: after a few of these the batch is dead."""
        log.warning("a batch cannot be trained on", id=lease.id, error=reason)
        self.ledger.refuse(lease)
        self._client.release([lease], error=reason[:_MAX_REASON])

    @property
    def settling_is_due(self) -> bool:
        """Whether half of the allowance waits for a checkpoint. The next step needs the other half."""
        return 2 * self.ledger.unsettled >= self._allowance

    def settle(self, checkpoint: Path, ids: Sequence[str]) -> None:
        """Acks the batches that a durable checkpoint includes. The ledger drops those that the server confirms."""
        self._ack(self.ledger.settle(ids), checkpoint.name)

    def settle_rest(self, *, check: Callable[[], None]) -> None:
        """Waits until the batches that are left in the ledger have been leased again and acked.

        Call it when a run is finished: no later process will ack them. The wait also ends when the server has nothing
        more to lease, because it no longer has the others. check is called while waiting; it may raise to end the wait.
        """
        self._nothing_to_lease.clear()
        if self.ledger.ids():
            self._buffer.hold_ahead(self._ahead)
        while self.ledger.ids() and not self._buffer.full and not self._nothing_to_lease.wait(0.05):
            if self._failure:
                raise self._failure
            check()

    def finish(self) -> None:
        """Ends leasing and finishes the run on the server, where its remaining batches expire."""
        self.close()
        self._client.finish_run(self._terms.run, self._terms.lineage)

    def close(self) -> None:
        """Ends both threads and releases untrained batches. Trained batches that no checkpoint includes stay leased."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=_POLL_SECONDS + 1)
        self._release(self.ledger.untrained())

    def _ack(self, leases: Sequence[Leased], checkpoint: str) -> None:
        outcomes = self._client.ack(leases, checkpoint)
        self.ledger.acked(leases, outcomes)
        refused = [id for id, outcome in outcomes.items() if outcome in (Outcome.STALE, Outcome.UNKNOWN)]
        drop_done(self._client, self.ledger, refused, self._stop.is_set)

    def _trainable(self, leased: Leased) -> bool:
        """Whether it can be trained on now. If not, it has been released where necessary."""
        self._terms.check_ours(leased)
        if not self.ledger.trainable([leased]):
            return False
        if self._terms.too_old(leased.batch, self._version):
            self._release([leased])
            return False
        if refusal := self._terms.foreign(leased.batch, self._version) or self._check.refusal(leased.batch):
            self.refuse(leased, refusal)
            return False
        return True

    def _start(self, taken: list[Leased]) -> list[Leased]:
        """Marks leases as started. Returns those that are still live: they may have expired during a suspension."""
        taken = self.ledger.trainable(taken)  # a batch that came again may appear twice; keep the live lease
        outcomes = self._client.extend(taken, self._terms.lease_seconds, started=True)
        self.ledger.forget(lease for lease in taken if outcomes[lease.id] != Outcome.OK)
        return [lease for lease in taken if outcomes[lease.id] == Outcome.OK]

    def _release(self, leases: Sequence[Leased]) -> None:
        self.ledger.forget(leases)
        self._client.release(leases)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # raised again where the training loop takes batches
            self._failure = error

    def _fetch(self) -> None:
        while not self._stop.is_set():
            count = min(self._buffer.lacking(_LOOK_SECONDS), MAX_LEASES)
            if not count:
                continue
            # The first request does not wait: its answer says whether the run may begin.
            wait = _POLL_SECONDS if self._entered.is_set() else 0.0
            try:
                held = self._client.lease_many(self._terms.at(self._version, wait_seconds=wait, count=count))
            except RefServerError as error:
                self._stop.wait(self._refusals.refused(error))
                continue
            self._refusals.admitted()
            self._entered.set()
            if not held:
                self._nothing_to_lease.set()
            self._receive(held)

    def _receive(self, held: Sequence[LeasedOrUnusable]) -> None:
        """Sorts leased batches. All leases are in the ledger first: from then on heartbeats extend them."""
        untrained, done = self.ledger.add([lease for lease in held if isinstance(lease, Leased)])
        for unusable in held:
            if isinstance(unusable, UnusableBatch):
                self.refuse(unusable, unusable.reason)
        self._buffer.add(untrained)
        if done:
            self._ack(done, "an earlier checkpoint")

    def _send_heartbeats(self) -> None:
        while not self._stop.wait(self._terms.lease_seconds / 3):
            live = self.ledger.live()
            outcomes = self._client.extend(live, self._terms.lease_seconds)
            lost = [lease for lease in live if outcomes[lease.id] in (Outcome.STALE, Outcome.UNKNOWN)]
            if lost:
                log.warning("leases were lost: this process was suspended, or the server lost them", batches=len(lost))
            self.ledger.forget(lost)


def _problem(leased: Leased) -> tuple[float, str]:
    """What a batch is sorted by, and its problem known by. Batches without an index come last, each its own problem."""
    index = leased.batch.index
    return (math.inf, leased.id) if index is None else (index, "")
