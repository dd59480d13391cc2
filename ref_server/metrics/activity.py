"""What a queue has done since this process opened it, for those who watch.

Only what was committed counts. In a store that several servers share, each tells what it did itself.
"""

import threading
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from ref_server.metrics.histogram import Histogram

_GROUP_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Count(StrEnum):
    ADMITTED = "admitted"
    DUPLICATE = "duplicate"  # uploads of a batch that is, or was, there
    LEASED = "leased"
    REDELIVERED = "redelivered"  # those of the leases whose batch had come back from another
    ACKED = "acked"
    RELEASED = "released"
    LEASE_EXPIRED = "lease_expired"
    LEASE_SUPERSEDED = "lease_superseded"  # its consumer came again, in a new incarnation
    REQUEUED = "requeued"
    EXPIRED_STALE = "expired_stale"
    EXPIRED_ABANDONED = "expired_abandoned"
    EXPIRED_DROPPED = "expired_dropped"
    EXPIRED_DISPLACED = "expired_displaced"  # newer ones of the same run took its place
    DELIVERED = "delivered"  # without a lease, once and for all
    DEAD_SCORING = "dead_scoring"  # it could not be scored
    DEAD_TRAINING = "dead_training"  # what leased it broke, time and again
    DEAD_INTERRUPTED = "dead_interrupted"  # servers ended while scoring it


@dataclass(frozen=True)
class Tally:
    """What one transaction does, as long as it is not committed. ready_after: seconds from admission to scored."""

    counts: Counter[Count] = field(default_factory=Counter)
    ready_after: list[float] = field(default_factory=list)


class Activity:
    """Counts and times since it was made.

    ready_after: seconds from a batch's admission to its scores. Of durable commits alone, commit_seconds: what they
    took, flush included, and commit_sizes: operations that shared one.
    """

    def __init__(self) -> None:
        self._counts = dict.fromkeys(Count, 0)
        self._lock = threading.Lock()
        self.ready_after = Histogram()
        self.commit_seconds = Histogram()
        self.commit_sizes = Histogram(_GROUP_SIZES)

    def add(self, tally: Tally) -> None:
        """Counts what a transaction did. Call it once that is committed."""
        with self._lock:
            for count, times in tally.counts.items():
                self._counts[count] += times
        for seconds in tally.ready_after:
            self.ready_after.observe(seconds)

    def flushed(self, seconds: float, operations: int) -> None:
        """Notes a durable commit."""
        self.commit_seconds.observe(seconds)
        self.commit_sizes.observe(operations)

    def counts(self) -> dict[Count, int]:
        with self._lock:
            return self._counts.copy()
