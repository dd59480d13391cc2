"""The ledger of leased and of trained batches. It ensures that no batch is trained twice."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus

import structlog

from shared.api import Outcome, State
from shared.client import Leased, RefServerClient, RefServerError, UnusableBatch

log = structlog.get_logger()

# States of batches that will be leased again, and are acked then.
_COMING = (State.QUEUED, State.SCORING, State.READY, State.LEASED)


class Ledger:
    """Live leases, and batches that were trained and not yet acked. Threads may share it: one lock guards all.

    ids: batches that were trained and not yet acked, from the checkpoint that a run resumes from. An id is added by
    `mark_trained`, and leaves only when the server has confirmed its ack, or reports the batch as done. `unsettled`
    are those of the ids that no durable checkpoint includes: they must not be acked yet. A batch that is leased again
    has several leases; only the newest can be live.
    """

    def __init__(self, ids: Iterable[str] = ()) -> None:
        self._ids = set(ids)
        self._unsettled: set[str] = set()
        self._live: dict[str, Leased] = {}
        self._refused = 0
        self._lock = threading.Lock()

    def ids(self) -> list[str]:
        """Trained batches whose ack the server has not confirmed, sorted."""
        with self._lock:
            return sorted(self._ids)

    @property
    def unsettled(self) -> int:
        """How many batches were trained since the last checkpoint."""
        with self._lock:
            return len(self._unsettled)

    def live(self) -> list[Leased]:
        with self._lock:
            return [*self._live.values()]

    def untrained(self) -> list[Leased]:
        """Live leases of batches that were not trained."""
        with self._lock:
            return [lease for id, lease in self._live.items() if id not in self._ids]

    def trainable(self, leases: Sequence[Leased]) -> list[Leased]:
        """The leases that are live, and whose batch was not trained under an earlier lease."""
        with self._lock:
            return [lease for lease in leases if self._is_live(lease) and lease.id not in self._ids]

    def add(self, leases: Sequence[Leased]) -> tuple[list[Leased], list[Leased]]:
        """Adds leases, each of which replaces older ones of its batch. Returns those to train on, and those to ack.

        A batch that was trained is acked if a checkpoint includes it. If none does yet, its lease is in neither list.
        """
        with self._lock:
            self._live |= {lease.id: lease for lease in leases}
            untrained = [lease for lease in leases if lease.id not in self._ids]
            settled = self._ids - self._unsettled
            return untrained, [lease for lease in leases if lease.id in settled]

    def forget(self, leases: Iterable[Leased]) -> None:
        """Removes leases that were lost, released or acked. A newer lease of the same batch stays."""
        with self._lock:
            self._forget(leases)

    @property
    def refused(self) -> int:
        """How often a batch was refused."""
        with self._lock:
            return self._refused

    def refuse(self, lease: Leased | UnusableBatch) -> None:
        """Removes a lease whose batch cannot be trained on, and counts it."""
        with self._lock:
            self._refused += 1
            self._forget([lease])

    def mark_trained(self, leases: Iterable[Leased]) -> None:
        with self._lock:
            ids = {lease.id for lease in leases}
            self._ids |= ids
            self._unsettled |= ids

    def settle(self, ids: Iterable[str]) -> list[Leased]:
        """Call it when a durable checkpoint includes these trained batches. Returns their live leases, to ack.

        A batch whose lease was lost is acked when it is leased again.
        """
        with self._lock:
            included = self._ids & set(ids)
            self._unsettled -= included
            return [lease for id, lease in self._live.items() if id in included]

    def acked(self, leases: Iterable[Leased], outcomes: Mapping[str, Outcome]) -> None:
        """Removes the ids whose ack the server confirms. The others stay: their batches may be leased again."""
        with self._lock:
            self._ids -= {id for id, outcome in outcomes.items() if outcome in (Outcome.OK, Outcome.ALREADY)}
            self._forget(leases)

    def drop(self, ids: Iterable[str]) -> None:
        """Removes ids of batches that the server reports as done: they are never leased again."""
        with self._lock:
            self._ids -= set(ids) - self._unsettled

    def _forget(self, leases: Iterable[Leased | UnusableBatch]) -> None:
        for lease in leases:
            if self._is_live(lease):
                del self._live[lease.id]

    def _is_live(self, lease: Leased | UnusableBatch) -> bool:
        live = self._live.get(lease.id)
        return live is not None and live.token == lease.token  # a newer lease of it has another token


def drop_done(client: RefServerClient, ledger: Ledger, ids: Iterable[str], stopped: Callable[[], bool]) -> None:
    """Asks the server for each id, and removes from the ledger those whose batch is done.

    A checkpoint is written before its batches are acked, so the ids that a run resumes with are mostly done. Ids that
    are expired, dead or unknown stay: a person may requeue a batch, or this may be another server than before, and a
    batch that the weights hold must not train twice. They are logged once.
    """
    left: Counter[str] = Counter()
    for id in ids:
        if stopped():
            return
        try:
            state = client.batch(id).state
        except RefServerError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            state = None
        if state is State.DONE:
            ledger.drop([id])
        elif state not in _COMING:
            left[state or "unknown"] += 1
    if left:
        log.warning(
            "batches that the weights hold were never acknowledged. They stay in the ledger, so that they cannot "
            "train twice; unknown ones may be of another server or another `--data-dir`",
            **left,
        )
