"""Upload, lease and ack of a batch: over HTTP with one client and with eight, and in one process (store.py).

A flush takes from 0.1 to 10 milliseconds, depending on the disk, so the tables give ratios and count flushes. One row
simulates a slow disk: each flush takes five milliseconds longer.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil

from tests.bench import measure, store
from tests.bench.clients import Clients, Taken, Template
from tests.bench.counted_server import read_count
from tests.bench.processes import SERVE, serving
from tests.postgresql import PostgresMissing, postgres

BATCH_BYTES = 100_000
CLIENTS = (1, 8)
CYCLES = 200
REPETITIONS = 5
SLOW_MS = 5


@dataclass
class Side:
    """Measurements with one number of clients. syncs and cpu: of the server, for each cycle."""

    taken: list[Taken] = field(default_factory=list)
    syncs: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return statistics.median(taken.rate for taken in self.taken)

    def upload_ms(self, percent: float) -> str:
        return f"{1000 * np.percentile([seconds for taken in self.taken for seconds in taken.uploads], percent):.1f}"


def through_server(options: tuple[str, ...], module: tuple[str, ...], count: Callable[[], int]) -> list[Side]:
    """A side for each number in CLIENTS, measured in turns. count: returns the number of flushes so far."""
    template = Template(BATCH_BYTES)
    sides = [Side() for _ in CLIENTS]
    with serving("--no-model", *options, module=module) as (pid, http):
        clients = [Clients(http.base_url.port or 0, number, template) for number in CLIENTS]
        for repetition in range(REPETITIONS + 1):
            for side, some in zip(sides, clients, strict=True):
                syncs, cpu = count(), cpu_seconds(pid)
                taken = some.cycle(CYCLES)
                if repetition:  # the first warms up
                    side.taken.append(taken)
                    side.syncs.append((count() - syncs) / CYCLES)
                    side.cpu.append((cpu_seconds(pid) - cpu) / CYCLES)
    return sides


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def counted(directory: Path, milliseconds: float) -> list[Side]:
    """SQLite, with each flush made longer by `milliseconds`."""
    file = directory / "flushes"
    module = ("tests.bench.counted_server", str(file), str(milliseconds), "serve")
    options = ("--data-dir", str(directory / f"data-{milliseconds}"))
    return through_server(options, module, lambda: read_count(file) if file.exists() else 0)


def row(name: str, sides: list[Side]) -> list[str]:
    single, many = sides
    syncs = statistics.median(many.syncs)
    return [
        name,
        f"{single.rate:.0f}",
        f"{many.rate:.0f}",
        f"{many.rate / single.rate:.1f}x",
        f"{syncs:.2f}" if syncs else "-",
        f"{statistics.median(many.cpu) * 1000:.1f}",
        f"{single.upload_ms(50)} / {single.upload_ms(99)}",
        f"{many.upload_ms(50)} / {many.upload_ms(99)}",
    ]


def show_server() -> None:
    rows = []
    with TemporaryDirectory() as name:
        directory = Path(name)
        rows.append(row("SQLite", counted(directory, 0)))
        rows.append(row(f"SQLite, flushes {SLOW_MS} ms longer", counted(directory, SLOW_MS)))
        try:
            with postgres() as cluster:
                options = ("--store", cluster.create_database("bench"), "--data-dir", name)
                rows.append(row("PostgreSQL", through_server(options, SERVE, lambda: 0)))
        except PostgresMissing as missing:
            print(f"without PostgreSQL: {missing}")
    measure.show(
        f"Upload, lease, ack over HTTP, batches of {BATCH_BYTES // 1000} KB, ref-server serve --no-model",
        [
            "store",
            *(f"{number} client{'s' if number > 1 else ''} /s" for number in CLIENTS),
            "ratio (bar 2.5x)",
            "flushes a cycle, 8 clients (bar 0.4)",
            "server CPU ms a cycle, 8 clients",
            *(f"upload ms p50 / p99, {number}" for number in CLIENTS),
        ],
        rows,
    )


def run() -> None:
    show_server()
    store.show_bare(BATCH_BYTES)
    store.show_depth()
