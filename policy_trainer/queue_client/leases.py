"""Scored batches on their way into training: leased ahead, kept alive, and settled when a checkpoint holds them."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import structlog

from policy_trainer.config import LossConfig
from policy_trainer.learner.groups import missing_input
from policy_trainer.queue_client.ledger import Ledger
from policy_trainer.queue_client.server import LeaseTerms
from shared.api import Outcome
from shared.client import Leased, RefServerClient

log = structlog.get_logger()

# A long poll of the fetching thread; closing waits for it.
_POLL_SECONDS = 2.0


class LeaseFeed:
    """Leases batches on a thread of its own, up to `ahead` before they are asked for, and sends heartbeats on another.

    allowance: batches that may be leased and not yet acked. loss: says which inputs a batch must have.

    A batch that comes again although the ledger holds it was trained in an earlier life: it is acked and skipped. One
    that was trained in this life comes again when its lease was lost, as by a suspended machine: it waits for the next
    checkpoint under its new lease.
    """

    def __init__(
        self,
        client: RefServerClient,
        terms: LeaseTerms,
        ledger: Ledger,
        loss: LossConfig,
        *,
        ahead: int,
        allowance: int,
        version: int,
    ) -> None:
        self._client = client
        self._terms = terms
        self._ledger = ledger
        self._loss = loss
        self._allowance = allowance
        self._waiting: queue.Queue[Leased] = queue.Queue(maxsize=ahead)
        self._version = version
        self._held: dict[str, Leased] = {}
        self._trained: dict[str, Leased] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._dry = threading.Event()
        self._failure: Exception | None = None
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for name, work in (("leases", self._fetch), ("heartbeat", self._beat))
        ]
        for thread in self._threads:
            thread.start()

    def take(self, count: int, *, version: int, on_idle: Callable[[float], None]) -> list[Leased]:
        """Waits for `count` batches that can be trained on at `version`, marked as started on the server.

        on_idle is told every half second how long there has been nothing; what it raises ends the wait, and the
        batches taken so far go back.
        """
        self._version = version
        taken: list[Leased] = []
        idle_since = time.monotonic()
        try:
            while len(taken) < count:
                leased = self._next()
                if leased is None:
                    on_idle(time.monotonic() - idle_since)
                    continue
                idle_since = time.monotonic()
                if self._superseded(leased):
                    continue
                if self._too_old(leased):
                    self._give_back([leased])
                    continue
                lacking = missing_input(leased.batch, self._loss)
                if lacking:
                    self._give_back([leased], error=lacking)
                    continue
                taken.append(leased)
                if len(taken) == count:
                    taken = self._start(taken)
        except BaseException:
            self._give_back(taken)
            raise
        return taken

    def trained(self, leased: Sequence[Leased]) -> None:
        """Tells the feed that the weights now hold the effect of these batches."""
        with self._lock:
            self._ledger.add(lease.id for lease in leased)
            self._trained.update({lease.id: lease for lease in leased})

    @property
    def unsettled(self) -> int:
        """Batches that were trained and wait for a checkpoint, so that they can be acked."""
        with self._lock:
            return len(self._trained)

    @property
    def settling_is_due(self) -> bool:
        """Whether half of the allowance waits for a checkpoint: the other half must do for the next step."""
        return 2 * self.unsettled >= self._allowance

    def settle(self, checkpoint: Path) -> None:
        """Acks what a durable checkpoint holds. What is answered leaves the ledger."""
        with self._lock:
            trained = list(self._trained.values())
        self._ack(trained, checkpoint.name)
        with self._lock:
            self._forget(trained)

    def settle_rest(self, *, check: Callable[[], None]) -> None:
        """Waits until what the ledger still holds has come again and is acked: nobody will ask for it after this life.

        No longer than the server has something to lease: what it does not lease again is settled there. check is called
        while waiting; what it raises ends the wait.
        """
        self._dry.clear()
        while self._ledger.ids() and not self._waiting.full() and not self._dry.wait(0.05):
            if self._failure:
                raise self._failure
            check()

    def close(self) -> None:
        """Ends both threads and gives back what was not trained. What was trained and not settled stays leased."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=_POLL_SECONDS + 1)
        with self._lock:
            unused = [lease for id, lease in self._held.items() if id not in self._trained]
        self._give_back(unused)

    def _ack(self, leases: Sequence[Leased], checkpoint: str) -> None:
        outcomes = self._client.ack(leases, checkpoint)
        # Otherwise the id stays in the ledger: should its batch come again, it is then acked untrained.
        self._ledger.remove(id for id, outcome in outcomes.items() if outcome in (Outcome.OK, Outcome.ALREADY))

    def _forget(self, leases: Iterable[Leased]) -> None:
        """These leases, but not a newer one of the same batch. Under the lock."""
        for lease in leases:
            for known in (self._held, self._trained):
                if known.get(lease.id) is lease:
                    del known[lease.id]

    def _superseded(self, leased: Leased) -> bool:
        """Whether, while it waited here, the lease was lost or its batch trained under an earlier one."""
        with self._lock:
            if self._held.get(leased.id) is not leased:
                return True
        if leased.id in self._ledger:
            self._receive(leased)
            return True
        return False

    def _next(self) -> Leased | None:
        if self._failure:
            raise self._failure
        try:
            return self._waiting.get(timeout=0.5)
        except queue.Empty:
            return None

    def _too_old(self, leased: Leased) -> bool:
        lag = self._version - leased.rollout.policy_version
        return self._terms.max_lag is not None and lag > self._terms.max_lag

    def _start(self, taken: list[Leased]) -> list[Leased]:
        """Those that are still ours: a trainer that slept past its leases finds out here, before it trains."""
        with self._lock:  # a batch that came again may appear twice; keep the live lease
            taken = [lease for lease in taken if self._held.get(lease.id) is lease]
        outcomes = self._client.extend(taken, self._terms.lease_seconds, started=True)
        with self._lock:
            self._forget(lease for lease in taken if outcomes[lease.id] != Outcome.OK)
        return [lease for lease in taken if outcomes[lease.id] == Outcome.OK]

    def _give_back(self, leases: Sequence[Leased], *, error: str | None = None) -> None:
        if error:
            log.warning("a batch cannot be trained on", ids=[lease.id for lease in leases], error=error)
        with self._lock:
            self._forget(leases)
        self._client.release(leases, error=error)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # raised again where the training loop takes batches
            self._failure = error

    def _fetch(self) -> None:
        while not self._stop.is_set():
            leased = self._client.lease(self._terms.at(self._version, wait_seconds=_POLL_SECONDS))
            if leased is None:
                self._dry.set()
            else:
                self._receive(leased)

    def _receive(self, leased: Leased) -> None:
        with self._lock:
            self._held[leased.id] = leased
            trained, unsettled = leased.id in self._ledger, leased.id in self._trained
            if unsettled:
                self._trained[leased.id] = leased
        if not trained:
            self._offer(leased)
        elif not unsettled:  # a checkpoint holds its effect
            self._ack([leased], "an earlier checkpoint")
            with self._lock:
                self._forget([leased])

    def _offer(self, leased: Leased) -> None:
        while not self._stop.is_set():
            try:
                return self._waiting.put(leased, timeout=0.5)
            except queue.Full:
                continue

    def _beat(self) -> None:
        while not self._stop.wait(self._terms.lease_seconds / 3):
            with self._lock:
                held = list(self._held.values())
            outcomes = self._client.extend(held, self._terms.lease_seconds)
            lost = [lease for lease in held if outcomes[lease.id] in (Outcome.STALE, Outcome.UNKNOWN)]
            if lost:
                log.warning("leases were lost: this process slept, or the server has forgotten them", batches=len(lost))
            with self._lock:
                for lease in lost:
                    if self._held.get(lease.id) is lease:
                        del self._held[lease.id]
