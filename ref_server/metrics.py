"""Prometheus metrics, read from the service at each scrape."""

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ref_server.service import Service


class Metrics(Collector):
    """One registry for one service, so that two servers in a process do not mix."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing ahead of the first scrape, so that registering does not read the queue."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._service.queue.stats()
        batches = GaugeMetricFamily("tandem_batches", "Batches by run and state.", labels=["run", "state"])
        size = GaugeMetricFamily("tandem_batch_bytes", "Payload bytes by run and state.", labels=["run", "state"])
        for depth in stats.depths:
            batches.add_metric([depth.run, depth.state], depth.batches)
            size.add_metric([depth.run, depth.state], depth.payload_bytes)
        yield from (batches, size)
        yield GaugeMetricFamily(
            "tandem_oldest_waiting_seconds", "Age of the oldest waiting batch.", value=stats.oldest_age or 0.0
        )
        totals = self._service.scoring.totals
        yield CounterMetricFamily("tandem_scored_batches", "Batches scored.", value=totals.batches)
        yield CounterMetricFamily("tandem_scored_tokens", "Tokens of scored batches.", value=totals.tokens)
        yield CounterMetricFamily("tandem_scoring_errors", "Batches that could not be scored.", value=totals.errors)
        yield CounterMetricFamily("tandem_scoring_working_seconds", "Time spent scoring.", value=totals.working_seconds)
        yield CounterMetricFamily(
            "tandem_scoring_waiting_seconds", "Time spent waiting for batches.", value=totals.waiting_seconds
        )
