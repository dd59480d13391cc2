"""Prometheus counters and histograms, one file for each part of the server.

Each object has its own registry, so that several servers can live in one process.
"""

from prometheus_client import Counter

# Bounds of histograms, in seconds: fine for quick operations, with room for long polls and long forwards.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
# Ends the help of a counter.
SINCE_START = "by this process since its start."


def value(counter: Counter) -> float:
    """The count so far. prometheus-client exposes it only as samples."""
    samples = [sample for metric in counter.collect() for sample in metric.samples]
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))
