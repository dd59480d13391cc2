"""A process's memory, files, threads and disk space, sampled from outside."""

import csv
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import psutil

from tests.bench.processes import resident_mib

_MIB = 2**20


@dataclass(frozen=True)
class Sample:
    """at: seconds since the start. resident, data, wal: MiB. known: ids that the queue remembers. done: of these."""

    at: float
    resident: float
    files: int
    threads: int
    data: float
    wal: float
    known: int
    done: int


class Sampler:
    """Samples of one server and its data directory."""

    def __init__(self, pid: int, data: Path) -> None:
        self._process = psutil.Process(pid)
        self._data = data
        self._began = time.monotonic()

    def take(self, states: dict[str, dict[str, int]]) -> Sample:
        """states: as in /v1/queue."""
        sizes = {path.name: path.stat().st_size / _MIB for path in self._data.rglob("*") if path.is_file()}
        return Sample(
            at=round(time.monotonic() - self._began, 1),
            resident=round(self._process.memory_info().rss / _MIB, 2),
            files=self._process.num_fds(),
            threads=self._process.num_threads(),
            data=round(sum(size for name, size in sizes.items() if not name.endswith("-wal")), 3),
            wal=round(sum(size for name, size in sizes.items() if name.endswith("-wal")), 3),
            known=sum(depth["batches"] for depth in states.values()),
            done=states["done"]["batches"],
        )


def write(path: Path, samples: Sequence[Sample]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, [field.name for field in fields(Sample)])
        rows.writeheader()
        rows.writerows(asdict(sample) for sample in samples)


@contextmanager
def watched(pid: int) -> Iterator[list[float]]:
    """The server's resident MiB, once a second while the block runs."""
    resident: list[float] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            resident.append(resident_mib(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield resident
    finally:
        over.set()
        thread.join()
