"""Counts of the bytes of published weights."""

from prometheus_client import CollectorRegistry, Counter

from ref_server.metrics.counters import SINCE_START


class WeightsTraffic:
    """received: bytes of uploaded files. sent: bytes of downloads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.received = self._counter("weights_received_bytes", "Bytes of uploaded weights")
        self.sent = self._counter("weights_sent_bytes", "Bytes of downloaded weights")

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"tandem_{name}", f"{help}, {SINCE_START}", registry=self.registry)
