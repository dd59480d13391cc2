"""Leased batches a second as the trainer's client gets them: one a request, and many, from servers on both stores.

Both sides lease the same batches of one server in turns and give them back. The client parses each batch.
"""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from tempfile import TemporaryDirectory

from uuid6 import uuid7

from shared.api import LeaseBody
from shared.client import LeasedOrUnusable, RefServerClient
from tests.bench import measure
from tests.bench.clients import Template
from tests.bench.processes import serving
from tests.postgresql import PostgresMissing, postgres

BATCH_BYTES = 10_000
BATCHES = 512
COUNTS = (64, 512)
REPETITIONS = 3
_TERMS = LeaseBody(consumer="bench", run="bench", wait_seconds=0)


def one_by_one(client: RefServerClient) -> list[LeasedOrUnusable]:
    return [leased for _ in range(BATCHES) if (leased := client.lease(_TERMS))]


def many(client: RefServerClient, count: int) -> list[LeasedOrUnusable]:
    terms = _TERMS.model_copy(update={"count": count})
    return [held for _ in range(0, BATCHES, count) for held in client.lease_many(terms)]


def rates(client: RefServerClient) -> dict[int, float]:
    """Batches a second by count. Giving them back is not measured."""
    ways = {1: one_by_one, **{count: partial(many, count=count) for count in COUNTS}}
    taken: dict[int, list[float]] = {count: [] for count in ways}
    for repetition in range(REPETITIONS + 1):
        for count, way in ways.items():
            started = time.perf_counter()
            held = way(client)
            if repetition:  # the first warms up
                taken[count].append(time.perf_counter() - started)
            assert len(held) == BATCHES
            client.release(held)
    return {count: BATCHES / statistics.median(seconds) for count, seconds in taken.items()}


def row(store: str, *options: str) -> list[str]:
    template = Template(BATCH_BYTES)
    with (
        serving("--no-model", *options) as (_, http),
        RefServerClient(str(http.base_url)) as client,
        ThreadPoolExecutor(16) as workers,
    ):
        list(workers.map(client.upload, (template.body(str(uuid7())) for _ in range(BATCHES))))
        rate = rates(client)
    return [store, *(f"{rate[count]:.0f}" for count in rate), *(f"{rate[count] / rate[1]:.1f}x" for count in COUNTS)]


def run() -> None:
    rows = []
    with TemporaryDirectory() as directory:
        rows.append(row("SQLite", "--data-dir", directory))
        try:
            with postgres() as cluster:
                rows.append(row("PostgreSQL", "--store", cluster.create_database("bench"), "--data-dir", directory))
        except PostgresMissing as missing:
            print(f"without PostgreSQL: {missing}")
    measure.show(
        f"Leased and given back over HTTP, {BATCHES} batches of {BATCH_BYTES // 1000} KB, ref-server serve --no-model",
        [
            "store",
            "one a request /s",
            *(f"count {count} /s" for count in COUNTS),
            *(f"ratio, {count}" for count in COUNTS),
        ],
        rows,
    )
