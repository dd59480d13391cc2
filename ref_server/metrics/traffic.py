"""Counts of HTTP requests and responses, and of bytes of published weights. Clients cannot create new labels."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ref_server.metrics import SECONDS, SINCE_START

_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}


def known_method(method: str) -> str:
    """The method, or "other": a client can write anything there."""
    return method if method in _METHODS else "other"


class Traffic:
    """active: requests that are being answered."""

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
        self._seconds = Histogram(
            "tandem_http_request_seconds",
            "From a request's headers to its last answered byte, or a stream's first; leases include the wait.",
            ["route", "method"], buckets=SECONDS, registry=self.registry,
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
        self.received = self._counter("weights_received_bytes", "Bytes of uploaded weights")
        self.sent = self._counter("weights_sent_bytes", "Bytes of downloaded weights")

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"tandem_{name}", f"{help}, {SINCE_START}", registry=self.registry)
