"""Prometheus gauges of the server's state, computed at each scrape."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric

from ref_server.queue.records import DiskSpace, Stats
from shared.api import Depth, LimitsView, ModelInfo, State

# Clients name the runs, so there can be any number. At most this many get their own label.
MAX_RUNS = 100
OTHER_RUNS = "other"
_SETTLED = (State.DONE, State.EXPIRED, State.DEAD)


def server(
    version: str, ready: bool, store: bool, scoring: bool, model: ModelInfo, wanted_version: int
) -> Iterator[Metric]:
    yield InfoMetricFamily("tandem_build", "Version of the server.", {"version": version})
    yield _gauge("tandem_ready", "1 when a batch would be scored now, as /readyz says.", ready)
    yield _gauge("tandem_store_up", "1 when the store could be written, durably, at this scrape.", store)
    yield _gauge(
        "tandem_scoring_alive", "1 while every scoring loop runs, and where there is no model to score.", scoring
    )
    if model.reference_version is not None:
        help = "Version of the reference weights; it grows when they are replaced."
        yield _gauge("tandem_reference_version", help, model.reference_version)
        help = "Version that the queue wants its servers to score with; where they differ, this one claims no batches."
        yield _gauge("tandem_reference_wanted_version", help, wanted_version)


def depths(stats: Stats) -> Iterator[Metric]:
    rest = f"Beyond {MAX_RUNS} runs, those with the fewest batches are summed as run `{OTHER_RUNS}`."
    of, labels = "by run and state", ["run", "state"]
    batches = GaugeMetricFamily("tandem_batches", f"Batches {of}; leased are in flight. {rest}", labels=labels)
    size = GaugeMetricFamily("tandem_batch_bytes", f"Bytes of payloads {of}. {rest}", labels=labels)
    for (run, state), (count, payload_bytes) in _by_run(stats.runs).items():
        batches.add_metric([run, state], count)
        size.add_metric([run, state], payload_bytes)
    yield from (batches, size)
    bound = "queued, scoring, ready, and leased ones that are not trained on yet"
    yield _gauge("tandem_waiting_batches", f"Batches that count against max_batches: {bound}.", stats.waiting_batches)
    yield _gauge("tandem_waiting_bytes", "Bytes of payloads that count against max_mib.", stats.waiting_bytes)
    stored = sum(depth.bytes for states in stats.runs.values() for depth in states.values())
    yield _gauge("tandem_stored_bytes", "Bytes of payloads in any state: max_stored_mib bounds them.", stored)
    age = "Seconds since the admission of the oldest batch that is queued, scoring or ready; 0 when there is none."
    yield _gauge("tandem_oldest_waiting_seconds", age, stats.oldest_age or 0.0)


def disk(space: DiskSpace) -> Iterator[Metric]:
    yield _gauge("tandem_disk_free_bytes", "Free bytes of the disk that holds the embedded store.", space.free)
    yield _gauge("tandem_disk_floor_bytes", "Bytes of that disk that uploads leave free: min_free_mib.", space.floor)


def weights(versions: int, size: int) -> Iterator[Metric]:
    yield _gauge("tandem_weights_versions", "Published versions of weights that are kept.", versions)
    yield _gauge("tandem_weights_bytes", "Bytes of the published weights that are kept.", size)


def limits(bounds: LimitsView) -> Iterator[Metric]:
    """Each limit twice: for all runs together, and for a single run."""
    for name, help, of_all, of_run in (
        ("waiting_batches", "Batches that may wait", bounds.max_batches, bounds.max_batches_per_run),
        ("waiting_bytes", "Bytes of payloads that may wait", bounds.max_bytes, bounds.max_bytes_per_run),
        ("stored_bytes", "Bytes of payloads that may be stored", bounds.max_stored_bytes, bounds.max_stored_bytes // 2),
        ("in_flight_batches", "Batches that may be leased", bounds.max_in_flight, bounds.max_in_flight_per_run),
    ):
        scopes = "in all runs together (scope `all`), and in a run that is the only one (scope `run`)"
        help = f"{help}, {scopes}; beyond it clients get 429."
        family = GaugeMetricFamily(f"tandem_limit_{name}", help, labels=["scope"])
        family.add_metric(["all"], of_all)
        family.add_metric(["run"], of_run)
        yield family


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help, value=value)


def _by_run(runs: Mapping[str, Mapping[State, Depth]]) -> dict[tuple[str, State], tuple[int, int]]:
    """Batches and bytes by run and state. The MAX_RUNS runs with the most unsettled batches keep their names."""

    def order(run: str) -> tuple[int, int, str]:
        settled = sum(depth.batches for state, depth in runs[run].items() if state in _SETTLED)
        return settled - sum(depth.batches for depth in runs[run].values()), -settled, run

    named = set(sorted(runs, key=order)[:MAX_RUNS])
    sums: defaultdict[tuple[str, State], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for run, states in runs.items():
        for state, depth in states.items():
            label = (run if run in named else OTHER_RUNS, state)
            batches, size = sums[label]
            sums[label] = (batches + depth.batches, size + depth.bytes)
    return sums
