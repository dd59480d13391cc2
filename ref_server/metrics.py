"""Prometheus counters and histograms that other rooms fill: events of the queue, scoring, HTTP, published weights.

Each object has its own registry, so that several servers can live in one process.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# Bounds of histograms, in seconds: fine for quick operations, with room for long polls and long forwards.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_GROUP_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}


def _counter(registry: CollectorRegistry, name: str, help: str, labels: Iterable[str] = ()) -> Counter:
    return Counter(f"tandem_{name}", f"{help}, by this process since its start.", labels, registry=registry)


def _histogram(
    registry: CollectorRegistry,
    name: str,
    help: str,
    labels: Iterable[str] = (),
    bounds: tuple[float, ...] = _SECONDS,
) -> Histogram:
    return Histogram(f"tandem_{name}", help, labels, buckets=bounds, registry=registry)


def _value(counter: Counter) -> float:
    """The count so far. prometheus-client exposes it only as samples."""
    samples = [sample for metric in counter.collect() for sample in metric.samples]
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))


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


class Activity:
    """Counts and times of committed queue events since this process opened the queue.

    Servers that share a store each count their own.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters: dict[Count, Counter] = {}
        self._count_uploads_and_leases()
        self._count_ends_of_batches()
        self._ready_after = _histogram(
            self.registry, "admission_to_ready_seconds", "From a batch's admission until its scores were stored."
        )
        self._commit_seconds = _histogram(
            self.registry,
            "commit_seconds",
            "Duration of a durable commit of the store, its flush to the disk included.",
        )
        self._commit_sizes = _histogram(
            self.registry,
            "commit_operations",
            "Operations that shared one durable commit; on PostgreSQL each has its own.",
            bounds=_GROUP_SIZES,
        )

    def add(self, counts: Mapping[Count, int], ready_after: Iterable[float]) -> None:
        """Adds the events of a committed transaction. ready_after: seconds from a batch's admission to its scores."""
        for count, times in counts.items():
            self._counters[count].inc(times)
        for seconds in ready_after:
            self._ready_after.observe(seconds)

    def flushed(self, seconds: float, operations: int) -> None:
        """Notes a durable commit."""
        self._commit_seconds.observe(seconds)
        self._commit_sizes.observe(operations)

    def counts(self) -> dict[Count, int]:
        return {count: int(_value(self._counters[count])) for count in Count}

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
        self._counters[count] = _counter(self.registry, name, help)

    def _count_by(self, name: str, help: str, label: str, **counts: Count) -> None:
        """One counter for several counts, each with its own value of the label."""
        counter = _counter(self.registry, name, help, [label])
        self._counters |= {count: counter.labels(value) for value, count in counts.items()}


@dataclass(frozen=True)
class DeviceTotals:
    """What has been scored on a device. batches, tokens: of the queue. direct_tokens: of direct requests.

    errors: failed attempts. splits: forwards that were halved. working_seconds, waiting_seconds: of the scoring loop.
    forward_seconds: each forward. batch_seconds: from the claim of each batch until its scores were saved.
    """

    batches: Counter
    tokens: Counter
    direct_tokens: Counter
    errors: Counter
    splits: Counter
    working_seconds: Counter
    waiting_seconds: Counter
    forward_seconds: Histogram
    batch_seconds: Histogram


class ScoringTotals:
    """The totals of all devices of a server since its start."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._all = DeviceTotals(
            batches=self._counter("scored_batches", "Queued batches scored"),
            tokens=self._counter("scored_tokens", "Tokens of queued batches scored, prompts included"),
            direct_tokens=self._counter(
                "direct_scored_tokens", "Tokens scored for requests that wait for the answer, prompts included"
            ),
            errors=self._counter("scoring_errors", "Attempts at scoring a batch that failed"),
            splits=self._counter("forward_splits", "Forwards halved because memory did not suffice"),
            working_seconds=self._counter("scoring_working_seconds", "Seconds that the scoring loop scored"),
            waiting_seconds=self._counter(
                "scoring_waiting_seconds", "Seconds that the scoring loop waited for batches"
            ),
            forward_seconds=self._histogram("forward_seconds", "One forward of the reference model."),
            batch_seconds=self._histogram("score_seconds", "From the claim of a batch until its scores were stored."),
        )

    def of(self, device: str) -> DeviceTotals:
        """The totals of one device. Replicas on the same device share them."""
        return DeviceTotals(
            **{field.name: getattr(self._all, field.name).labels(device) for field in fields(self._all)}
        )

    def counts(self) -> dict[str, float]:
        """The counters by their names here, summed over the devices."""
        return {name: _value(counter) for name, counter in vars(self._all).items() if isinstance(counter, Counter)}

    def _counter(self, name: str, help: str) -> Counter:
        return _counter(self.registry, name, help, ["device"])

    def _histogram(self, name: str, help: str) -> Histogram:
        return _histogram(self.registry, name, help, ["device"])


def known_method(method: str) -> str:
    """The method, or "other": a client can write anything there, and must not create labels."""
    return method if method in _METHODS else "other"


class Traffic:
    """HTTP requests and responses. active: requests that are being answered."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "tandem_http_requests", "Requests answered, by route, method and status; 499: the client went away first.",
            ["route", "method", "status"], registry=self.registry,
        )  # fmt: skip
        self._errors = Counter(
            "tandem_http_errors",
            "Errors answered, by status and the `code` in the answer: 429 is queue_full, in_flight_full or busy.",
            ["status", "code"], registry=self.registry,
        )  # fmt: skip
        self._seconds = _histogram(
            self.registry, "http_request_seconds",
            "From a request's headers to its last answered byte, or a stream's first; leases include the wait.",
            ["route", "method"],
        )  # fmt: skip
        self.active = Gauge(
            "tandem_http_requests_active", "Requests that are being answered, waiting leases and streams too.",
            registry=self.registry,
        )  # fmt: skip

    def add(self, route: str, method: str, status: int, code: str | None, seconds: float) -> None:
        """code: of the error that was answered, if any."""
        method = known_method(method)
        self._requests.labels(route, method, status).inc()
        self._seconds.labels(route, method).observe(seconds)
        if code is not None:
            self._errors.labels(status, code).inc()


class WeightsTraffic:
    """received: bytes of uploaded files. sent: bytes of downloads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.received = _counter(self.registry, "weights_received_bytes", "Bytes of uploaded weights")
        self.sent = _counter(self.registry, "weights_sent_bytes", "Bytes of downloaded weights")
