"""The queue on both stores: clients over HTTP, many leases in one request, and how much a long queue slows it down."""

import http.client
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from uuid6 import uuid7

from benchmarks import measure
from benchmarks.processes import cpu_seconds
from ref_server.cli.serve import open_queue
from ref_server.config import ServeConfig
from ref_server.queue.queue import Queue
from ref_server.queue.records import Upload
from shared import wire
from shared.api import LeaseBody, LeaseKey
from shared.client import LeasedOrUnusable, RefServerClient
from tests.harness.postgresql import PostgresMissing, postgres
from tests.harness.server import Server

CYCLES, REPETITIONS = 200, 5
CLIENTS = (1, 8)
COUNTS = (64, 512)
LEASED = 512
DEPTHS = (100, 100_000)
_JSON, _BATCH = ({"Content-Type": kind} for kind in ("application/json", wire.CONTENT_TYPE))

# The directory of a server, and further options of `ref-server serve`.
Place = tuple[Path, tuple[str, ...]]
# By name: makes the place of a new store of this kind, which is called like this.
Stores = dict[str, Callable[[str], Place]]


@contextmanager
def stores() -> Iterator[Stores]:
    """PostgreSQL is left out where it is not installed."""
    with TemporaryDirectory() as directory, ExitStack() as stack:
        made: Stores = {"SQLite": lambda name: (Path(directory, name), ())}
        try:
            cluster = stack.enter_context(postgres())
            made["PostgreSQL"] = lambda name: (Path(directory, name), ("--store", cluster.create_database(name)))
        except PostgresMissing as missing:
            print(f"without PostgreSQL: {missing}")
        yield made


# ---------------------------------------------------------------- clients over HTTP


def cycle(connection: http.client.HTTPConnection, template: measure.Template, times: int) -> list[float]:
    """Uploads a batch, leases one and acks it, again and again; returns the seconds of each upload."""
    uploads = []
    for _ in range(times):
        began = time.perf_counter()
        _post(connection, "/v1/batches", template.body(str(uuid7())), _BATCH)
        uploads.append(time.perf_counter() - began)
        leased = _post(connection, "/v1/batches/lease", b'{"consumer": "bench"}', _JSON)
        key = {"id": leased["Batch-Id"], "token": leased["Lease-Token"]}
        _post(connection, "/v1/leases/ack", json.dumps({"leases": [key]}).encode(), _JSON)
    return uploads


def _post(
    connection: http.client.HTTPConnection, path: str, body: bytes, headers: dict[str, str]
) -> http.client.HTTPMessage:
    """Not our client: it would take CPU time from the server."""
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status in (200, 201), content
    return answer.headers


def cycles_row(store: str, place: Place) -> list[str]:
    template, uploads = measure.Template(100_000), {number: list[float]() for number in CLIENTS}
    rates, cpu = {number: list[float]() for number in CLIENTS}, list[float]()
    with Server(None, place[0], *place[1]) as server:
        pid = server.popen.pid
        clients = {
            number: [http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(number)] for number in CLIENTS
        }
        for repetition in range(REPETITIONS + 1):
            for number, connections in clients.items():
                used, began = cpu_seconds(pid), time.perf_counter()
                with ThreadPoolExecutor(number) as threads:
                    work = partial(cycle, template=template, times=CYCLES // number)
                    seconds = [upload for each in threads.map(work, connections) for upload in each]
                if repetition:  # the first warms up
                    rates[number].append(CYCLES / (time.perf_counter() - began))
                    uploads[number] += seconds
                    cpu.append(1000 * (cpu_seconds(pid) - used) / CYCLES)
    rate = {number: statistics.median(rates[number]) for number in CLIENTS}
    spans = (1000 * np.percentile(uploads[number], (50, 99)) for number in CLIENTS)
    return [
        store,
        *(f"{each:.0f}" for each in rate.values()),
        f"{rate[8] / rate[1]:.1f}x",
        f"{statistics.median(cpu):.1f}",
        *(f"{median:.1f} / {high:.1f}" for median, high in spans),
    ]


# ---------------------------------------------------------------- leases of many batches


def take(client: RefServerClient, count: int) -> list[LeasedOrUnusable]:
    terms = LeaseBody(consumer="bench", run="bench", wait_seconds=0)
    if count == 1:
        return [leased for _ in range(LEASED) if (leased := client.lease(terms))]
    terms = terms.model_copy(update={"count": count})
    return [leased for _ in range(0, LEASED, count) for leased in client.lease_many(terms)]


def leases_row(store: str, place: Place) -> list[str]:
    """Leased batches a second. Giving them back is not measured."""
    template, taken = measure.Template(10_000), {count: list[float]() for count in (1, *COUNTS)}
    with Server(None, place[0], *place[1]) as server, RefServerClient(server.url) as client:
        with ThreadPoolExecutor(16) as workers:
            list(workers.map(client.upload, (template.body(str(uuid7())) for _ in range(LEASED))))
        for repetition in range(4):
            for count, seconds in taken.items():
                began = time.perf_counter()
                leased = take(client, count)
                if repetition:  # the first warms up
                    seconds.append(time.perf_counter() - began)
                assert len(leased) == LEASED
                client.release(leased)
    rate = {count: LEASED / statistics.median(seconds) for count, seconds in taken.items()}
    return [store, *(f"{each:.0f}" for each in rate.values()), *(f"{rate[count] / rate[1]:.1f}x" for count in COUNTS)]


# ---------------------------------------------------------------- a long queue


def make_upload(body: bytes) -> Upload:
    return Upload(str(uuid7()), b"." * 32, "bench", 0, 0, 8, 160, 8, body)


def move(queue: Queue, body: bytes) -> None:
    """Uploads 50 batches, and moves the oldest one of each state on as often."""
    for _ in range(50):
        queue.put(make_upload(body))
        for claim in queue.claim(1):
            queue.complete(claim.id, body[::-1])
        (leased,) = queue.lease(LeaseBody(consumer="bench"))
        queue.ack([LeaseKey(id=leased.id, token=leased.token)])


def depth_row(store: str, place: Callable[[str], Place]) -> list[str]:
    body, sides = measure.Template(2000).body(str(uuid7())), {}
    limits = {"max_batches": 10**6, "max_batches_per_run": 10**6}
    with ExitStack() as stack:
        for depth in DEPTHS:
            directory, options = place(f"depth-{depth}")
            fields = {"data_dir": str(directory), **dict(zip(("store",), options[1:], strict=False))}
            queue = open_queue(ServeConfig.model_validate({"no_model": True, "queue": limits, **fields}))
            stack.callback(queue.close)
            with ThreadPoolExecutor(64) as threads:
                list(threads.map(queue.put, (make_upload(body) for _ in range(depth))))
            sides[str(depth)] = partial(move, queue, body)
        shallow, deep = measure.median_seconds(sides, 9).values()
    return [store, f"{50 / shallow:.0f}", f"{50 / deep:.0f}", f"{shallow / deep:.2f}"]


def run() -> None:
    with stores() as made:
        spans = (f"upload ms p50 / p99, {number}" for number in CLIENTS)
        measure.show(
            "Upload, lease, ack over HTTP, batches of 100 KB, ref-server serve --no-model; clients",
            ["store", *(f"{number} /s" for number in CLIENTS), "ratio (bar 2.5x)", "server CPU ms a cycle", *spans],
            [cycles_row(store, place("cycles")) for store, place in made.items()],
        )
        measure.show(
            "put, claim, complete, lease, ack in one process, batches of 2 KB",
            ["store", *(f"{depth:,} wait, cycles /s" for depth in DEPTHS), "ratio (bar 0.80)"],
            [depth_row(store, place) for store, place in made.items()],
        )


def run_leases() -> None:
    with stores() as made:
        measure.show(
            f"Leased over HTTP by the Python client, {LEASED} batches of 10 KB, ref-server serve --no-model",
            ["store", *(f"{count} a request, /s" for count in (1, *COUNTS)), *(f"ratio, {each}" for each in COUNTS)],
            [leases_row(store, place("leases")) for store, place in made.items()],
        )
