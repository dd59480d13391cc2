"""The server's numbers as Prometheus families. Counters count since the start of this process, and only what it did."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from ref_server.metrics.activity import Activity, Count
from ref_server.metrics.histogram import Histogram
from ref_server.metrics.traffic import Traffic
from ref_server.queue.interface import Depth, Limits, Stats
from ref_server.scoring.reference import ScoringTotals
from shared.api import State

# Clients name runs, so that there can be any number of them: so many have labels of their own.
MAX_RUNS = 100
OTHER_RUNS = "other"
_SETTLED = (State.DONE, State.EXPIRED, State.DEAD)


def server(version: str, ready: bool, store: bool, scoring: bool, model: Mapping[str, Any]) -> Iterator[Metric]:
    yield InfoMetricFamily("tandem_build", "Version of the server.", {"version": version})
    yield _gauge("tandem_ready", "1 when a batch would be scored now, as /readyz says.", ready)
    yield _gauge("tandem_store_up", "1 when the store could be written, durably, at this scrape.", store)
    yield _gauge(
        "tandem_scoring_alive", "1 while the scoring loop runs, and where there is no model to score.", scoring
    )
    if model["reference_version"] is not None:
        help = "Version of the reference weights; it grows when they are replaced."
        yield _gauge("tandem_reference_version", help, model["reference_version"])


def depths(stats: Stats) -> Iterator[Metric]:
    rest = f"Beyond {MAX_RUNS} runs, those with the fewest batches are summed as run `{OTHER_RUNS}`."
    of, labels = "by run and state", ["run", "state"]
    batches = GaugeMetricFamily("tandem_batches", f"Batches {of}; leased are in flight. {rest}", labels=labels)
    size = GaugeMetricFamily("tandem_batch_bytes", f"Bytes of payloads {of}. {rest}", labels=labels)
    for (run, state), (count, payload_bytes) in _by_run(stats.depths).items():
        batches.add_metric([run, state], count)
        size.add_metric([run, state], payload_bytes)
    yield from (batches, size)
    bound = "queued, scoring, ready, and leased ones that are not trained on yet"
    yield _gauge("tandem_waiting_batches", f"Batches that count against max_batches: {bound}.", stats.waiting_batches)
    yield _gauge("tandem_waiting_bytes", "Bytes of payloads that count against max_mib.", stats.waiting_bytes)
    age = "Seconds since the admission of the oldest batch that is queued, scoring or ready; 0 when there is none."
    yield _gauge("tandem_oldest_waiting_seconds", age, stats.oldest_age or 0.0)


def limits(bounds: Limits) -> Iterator[Metric]:
    """Each twice: of all runs together, and of any one."""
    for name, help, of_all, of_run in (
        ("waiting_batches", "Batches that may wait", bounds.max_batches, bounds.max_batches_per_run),
        ("waiting_bytes", "Bytes of payloads that may wait", bounds.max_bytes, bounds.max_bytes_per_run),
        ("in_flight_batches", "Batches that may be leased", bounds.max_in_flight, bounds.max_in_flight_per_run),
    ):
        help = f"{help}, in all runs together (scope `all`) and in each (scope `run`); beyond it clients are told 429."
        family = GaugeMetricFamily(f"tandem_limit_{name}", help, labels=["scope"])
        family.add_metric(["all"], of_all)
        family.add_metric(["run"], of_run)
        yield family


def activity(done: Activity) -> Iterator[Metric]:
    counts = done.counts()

    def total(name: str, help: str, count: Count) -> Metric:
        return CounterMetricFamily(name, f"{help}, by this process since its start.", counts[count])

    def totals(name: str, help: str, label: str, by_value: dict[str, Count]) -> Metric:
        return _counter(name, f"{help}, by this process since its start.", [label], _pairs(by_value, counts))

    uploads = {"admitted": Count.ADMITTED, "duplicate": Count.DUPLICATE}
    yield totals("tandem_uploads", "Uploads taken; a duplicate is, or was, there already", "outcome", uploads)
    yield total("tandem_leases", "Leases granted", Count.LEASED)
    yield total("tandem_redeliveries", "Leases granted of a batch that came back from another", Count.REDELIVERED)
    ends = {
        "acked": Count.ACKED,
        "released": Count.RELEASED,
        "expired": Count.LEASE_EXPIRED,
        "superseded": Count.LEASE_SUPERSEDED,
    }
    help = "Leases that ended: acked; given back; not extended in time; or their consumer came again as another life"
    yield totals("tandem_lease_ends", help, "how", ends)
    expired = {
        "stale": Count.EXPIRED_STALE,
        "abandoned": Count.EXPIRED_ABANDONED,
        "dropped": Count.EXPIRED_DROPPED,
        "displaced": Count.EXPIRED_DISPLACED,
    }
    help = "Batches that expired: too old; of weights that a resumed training left; dropped by an operator; "
    help += "or displaced by newer ones of the legacy protocol"
    yield totals("tandem_expired_batches", help, "reason", expired)
    dead = {"scoring": Count.DEAD_SCORING, "training": Count.DEAD_TRAINING, "interrupted": Count.DEAD_INTERRUPTED}
    help = "Batches set aside: they could not be scored; broke what trained on them; or servers ended scoring them"
    yield totals("tandem_dead_batches", help, "reason", dead)
    yield total("tandem_requeued_batches", "Dead or expired batches brought back by an operator", Count.REQUEUED)
    yield total("tandem_legacy_deliveries", "Batches delivered by the legacy protocol's /get", Count.DELIVERED)
    help = "From a batch's admission until its scores were stored."
    yield _histogram("tandem_admission_to_ready_seconds", help, done.ready_after)
    help = "What a durable commit of the store took, its flush to the disk included."
    yield _histogram("tandem_commit_seconds", help, done.commit_seconds)
    help = "Operations that shared one durable commit; on PostgreSQL each has its own."
    yield _histogram("tandem_commit_operations", help, done.commit_sizes)


def scoring(totals: ScoringTotals) -> Iterator[Metric]:
    for name, help, value in (
        ("scored_batches", "Queued batches scored", totals.batches),
        ("scored_tokens", "Tokens of queued batches scored, prompts included", totals.tokens),
        ("direct_scored_tokens", "Tokens scored for /v1/logprobs, prompts included", totals.direct_tokens),
        ("scoring_errors", "Attempts at scoring a batch that failed", totals.errors),
        ("forward_splits", "Forwards halved because memory did not suffice", totals.splits),
        ("scoring_working_seconds", "Seconds that the scoring loop scored", totals.working_seconds),
        ("scoring_waiting_seconds", "Seconds that the scoring loop waited for batches", totals.waiting_seconds),
    ):
        yield CounterMetricFamily(f"tandem_{name}", f"{help}, by this process since its start.", value)
    yield _histogram("tandem_forward_seconds", "One forward of the reference model.", totals.forward_seconds)
    help = "From taking up a batch until its scores were stored."
    yield _histogram("tandem_score_seconds", help, totals.batch_seconds)


def http(traffic: Traffic) -> Iterator[Metric]:
    help = "Requests answered, by route, method and status; 499: the client went away first."
    requests = ((list(labels), count) for labels, count in traffic.requests.copy().items())
    yield _counter("tandem_http_requests", help, ["route", "method", "status"], requests)
    help = "Errors answered, by status and the `code` in the answer: 429 is queue_full, in_flight_full or busy."
    errors = ((list(labels), count) for labels, count in traffic.errors.copy().items())
    yield _counter("tandem_http_errors", help, ["status", "code"], errors)
    help = "From a request's headers to its last answered byte; leases include what they waited for a batch."
    family = HistogramMetricFamily("tandem_http_request_seconds", help, labels=["route", "method"])
    for labels, seconds in traffic.seconds.copy().items():
        family.add_metric(labels, *seconds.read())
    yield family
    yield _gauge("tandem_http_requests_active", "Requests that are being answered, waiting leases too.", traffic.active)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help, value=value)


def _counter(name: str, help: str, labels: list[str], samples: Iterable[tuple[list[str], float]]) -> Metric:
    family = CounterMetricFamily(name, help, labels=labels)
    for values, count in samples:
        family.add_metric(values, count)
    return family


def _histogram(name: str, help: str, histogram: Histogram) -> Metric:
    buckets, total = histogram.read()
    return HistogramMetricFamily(name, help, buckets, total)


def _pairs(by_value: dict[str, Count], counts: dict[Count, int]) -> Iterator[tuple[list[str], float]]:
    return (([value], counts[count]) for value, count in by_value.items())


def _by_run(depths: Iterable[Depth]) -> dict[tuple[str, State], tuple[int, int]]:
    """Batches and bytes by run and state. Runs with the most batches that are not settled come first."""
    weight: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for depth in depths:
        weight[depth.run][depth.state in _SETTLED] -= depth.batches
    named = set(sorted(weight, key=lambda run: (weight[run], run))[:MAX_RUNS])
    sums: defaultdict[tuple[str, State], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for depth in depths:
        label = (depth.run if depth.run in named else OTHER_RUNS, depth.state)
        batches, size = sums[label]
        sums[label] = (batches + depth.batches, size + depth.payload_bytes)
    return sums
