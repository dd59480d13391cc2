"""Counts of queue events since this process opened the queue.

Only committed events count. Servers that share a store each count their own.
"""

import collections
from dataclasses import dataclass, field
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Histogram

from ref_server.metrics import SECONDS, SINCE_START, value

_GROUP_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Count(StrEnum):
    ADMITTED = "admitted"
    DUPLICATE = "duplicate"  # uploads of a batch that was uploaded before
    LEASED = "leased"
    REDELIVERED = "redelivered"  # leases of a batch that came back from another lease
    ACKED = "acked"
    RELEASED = "released"
    LEASE_EXPIRED = "lease_expired"
    LEASE_SUPERSEDED = "lease_superseded"  # by a new incarnation of its consumer
    REQUEUED = "requeued"
    EXPIRED_STALE = "expired_stale"
    EXPIRED_ABANDONED = "expired_abandoned"
    EXPIRED_FINISHED = "expired_finished"
    EXPIRED_UNUSED = "expired_unused"  # it waited too long
    EXPIRED_DROPPED = "expired_dropped"
    EXPIRED_DISPLACED = "expired_displaced"  # by newer batches of the same run
    PAYLOAD_DROPPED = "payload_dropped"  # of a settled batch, to make room
    DELIVERED = "delivered"  # by the legacy protocol, without a lease
    DEAD_SCORING = "dead_scoring"  # it could not be scored
    DEAD_TRAINING = "dead_training"  # its consumers failed, max_deliveries times
    DEAD_INTERRUPTED = "dead_interrupted"  # servers ended while scoring it


@dataclass(frozen=True)
class Tally:
    """Events of one transaction that is not yet committed. ready_after: seconds from admission to scored."""

    counts: collections.Counter[Count] = field(default_factory=collections.Counter)
    ready_after: list[float] = field(default_factory=list)


class Activity:
    """Counts and times since it was made.

    ready_after: seconds from a batch's admission to its scores. commit_seconds: of each durable commit, flush
    included. commit_sizes: operations that shared one.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters: dict[Count, Counter] = {}
        self._count_uploads_and_leases()
        self._count_ends_of_batches()
        self.ready_after = self._histogram(
            "admission_to_ready_seconds", "From a batch's admission until its scores were stored.", SECONDS
        )
        self.commit_seconds = self._histogram(
            "commit_seconds", "Duration of a durable commit of the store, its flush to the disk included.", SECONDS
        )
        self.commit_sizes = self._histogram(
            "commit_operations",
            "Operations that shared one durable commit; on PostgreSQL each has its own.",
            _GROUP_SIZES,
        )

    def add(self, tally: Tally) -> None:
        """Adds the events of a transaction. Call it after the commit."""
        for count, times in tally.counts.items():
            self._counters[count].inc(times)
        for seconds in tally.ready_after:
            self.ready_after.observe(seconds)

    def flushed(self, seconds: float, operations: int) -> None:
        """Notes a durable commit."""
        self.commit_seconds.observe(seconds)
        self.commit_sizes.observe(operations)

    def counts(self) -> dict[Count, int]:
        return {count: int(value(self._counters[count])) for count in Count}

    def _count_uploads_and_leases(self) -> None:
        self._count_by(
            "uploads", "Uploads; a duplicate was uploaded before", "outcome",
            admitted=Count.ADMITTED, duplicate=Count.DUPLICATE,
        )  # fmt: skip
        self._count("leases", "Leases granted", Count.LEASED)
        self._count("redeliveries", "Leases granted of a batch that came back from another", Count.REDELIVERED)
        self._count_by(
            "lease_ends",
            "Leases that ended: acked; released; not extended in time; or superseded by the consumer's new incarnation",
            "how", acked=Count.ACKED, released=Count.RELEASED, expired=Count.LEASE_EXPIRED,
            superseded=Count.LEASE_SUPERSEDED,
        )  # fmt: skip

    def _count_ends_of_batches(self) -> None:
        self._count_by(
            "expired_batches",
            "Batches that expired: too old; abandoned by a resumed training or another training of the run's name; "
            "left over by a finished run; unused for too long; "
            "dropped by an operator; or displaced by newer ones of the legacy protocol",
            "reason", stale=Count.EXPIRED_STALE, abandoned=Count.EXPIRED_ABANDONED, finished=Count.EXPIRED_FINISHED,
            unused=Count.EXPIRED_UNUSED,
            dropped=Count.EXPIRED_DROPPED, displaced=Count.EXPIRED_DISPLACED,
        )  # fmt: skip
        self._count_by(
            "dead_batches",
            "Dead batches: scoring failed; training on them failed; or servers ended while scoring them",
            "reason", scoring=Count.DEAD_SCORING, training=Count.DEAD_TRAINING, interrupted=Count.DEAD_INTERRUPTED,
        )  # fmt: skip
        self._count("dropped_payloads", "Payloads of settled batches dropped to make room", Count.PAYLOAD_DROPPED)
        self._count("requeued_batches", "Dead or expired batches restored by an operator", Count.REQUEUED)
        self._count("legacy_deliveries", "Batches delivered by the legacy protocol's /get", Count.DELIVERED)

    def _count(self, name: str, help: str, count: Count) -> None:
        self._counters[count] = Counter(f"tandem_{name}", f"{help}, {SINCE_START}", registry=self.registry)

    def _count_by(self, name: str, help: str, label: str, **counts: Count) -> None:
        """One counter for several counts, each with its own value of the label."""
        counter = Counter(f"tandem_{name}", f"{help}, {SINCE_START}", [label], registry=self.registry)
        self._counters |= {count: counter.labels(value) for value, count in counts.items()}

    def _histogram(self, name: str, help: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(f"tandem_{name}", help, buckets=bounds, registry=self.registry)
