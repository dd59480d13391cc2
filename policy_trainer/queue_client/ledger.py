"""The ledger: leased batches, and which of them the weights hold already, so that each is trained exactly once."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto

from shared.api import Outcome
from shared.client import Leased


class Fate(Enum):
    """What to do with a batch that was leased."""

    TRAIN = auto()
    WAIT = auto()
    """It was trained since the last checkpoint: ack it at the next."""
    ACK = auto()
    """It was trained, and a checkpoint holds its effect."""


class Ledger:
    """Live leases, and batches that were trained and not yet acked. Threads may share it: one lock guards all.

    ids: those that were trained and not yet acked in the checkpoint that a run resumes from. A batch that is leased
    again has several leases; only the newest can be live.
    """

    def __init__(self, ids: Iterable[str] = ()) -> None:
        self._ids = set(ids)
        self._unsettled: set[str] = set()
        self._live: dict[str, Leased] = {}
        self._lock = threading.Lock()

    def ids(self) -> list[str]:
        """Batches whose effect the weights hold and whose ack was not answered, sorted."""
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
        """Live leases of batches whose effect the weights do not hold."""
        with self._lock:
            return [lease for id, lease in self._live.items() if id not in self._ids]

    def trainable(self, leases: Sequence[Leased]) -> list[Leased]:
        """Those that are live, and whose batch was not trained under an earlier lease."""
        with self._lock:
            return [lease for lease in leases if self._live.get(lease.id) is lease and lease.id not in self._ids]

    def add(self, lease: Leased) -> Fate:
        """A new lease, which replaces older ones of its batch."""
        with self._lock:
            self._live[lease.id] = lease
            if lease.id not in self._ids:
                return Fate.TRAIN
            return Fate.WAIT if lease.id in self._unsettled else Fate.ACK

    def forget(self, leases: Iterable[Leased]) -> None:
        """These leases are not live any more: lost, given back or acked. A newer lease of the same batch stays."""
        with self._lock:
            self._forget(leases)

    def train(self, leases: Iterable[Leased]) -> None:
        """The weights now hold the effect of these batches."""
        with self._lock:
            ids = {lease.id for lease in leases}
            self._ids |= ids
            self._unsettled |= ids

    def settle(self) -> list[Leased]:
        """A durable checkpoint holds all that was trained. Returns the live leases to ack.

        A batch whose lease was lost is acked when it comes again.
        """
        with self._lock:
            self._unsettled.clear()
            return [lease for id, lease in self._live.items() if id in self._ids]

    def acked(self, leases: Iterable[Leased], outcomes: Mapping[str, Outcome]) -> None:
        """Removes the ids that the server has as acked. The others stay: their batches may come again."""
        with self._lock:
            self._ids -= {id for id, outcome in outcomes.items() if outcome in (Outcome.OK, Outcome.ALREADY)}
            self._forget(leases)

    def _forget(self, leases: Iterable[Leased]) -> None:
        for lease in leases:
            if self._live.get(lease.id) is lease:
                del self._live[lease.id]
