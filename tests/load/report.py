"""The figures of a load test with their bars, the samples that they are made of, and whether these still grow."""

import csv
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.processes import resident_mib

_MIB = 2**20


@dataclass(frozen=True)
class Figure:
    """bar: what the value must reach, in words; empty if there is no bar. passed: whether it does."""

    what: str
    value: str
    bar: str = ""
    passed: bool = True


def show(title: str, figures: Sequence[Figure]) -> bool:
    """Prints a table; returns whether all bars are reached."""
    table = Table("", "measured", "bar", "verdict", title=title, title_justify="left")
    for figure in figures:
        verdict = "" if not figure.bar else "[green]passed[/green]" if figure.passed else "[red]MISSED[/red]"
        table.add_row(figure.what, figure.value, figure.bar, verdict)
    Console(width=140).print(table)
    return all(figure.passed for figure in figures)


def milliseconds(seconds: Collection[float]) -> str:
    """Median, 99th percentile and largest."""
    if not seconds:
        return "none"
    median, high = np.percentile([*seconds], (50, 99))
    return f"{1000 * median:.0f} / {1000 * high:.0f} / {1000 * max(seconds):.0f} ms"


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


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
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


def warm(values: Sequence[float]) -> np.ndarray:
    """The values after the first third."""
    return np.asarray(values[len(values) // 3 :], dtype=np.float64)


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Growth after the warm-up, by a least-squares line, and the mean level.

    A single peak changes the line less than it would change the difference of the last and the first value.
    """
    settled = warm(values)
    slope = float(np.polyfit(np.arange(len(settled)), settled, 1)[0])
    return slope * (len(settled) - 1), float(settled.mean())


def peaks(values: Sequence[float]) -> tuple[float, float]:
    """The largest value of the second third, and of the last."""
    settled = warm(values)
    middle = len(settled) // 2
    return float(settled[:middle].max()), float(settled[middle:].max())
