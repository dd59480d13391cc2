"""What a chaos test gets, and what it returns."""

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Event

from tests.harness.models import tiny_model
from tests.harness.postgresql import postgres
from tests.harness.server import Server

BACKENDS = ("sqlite", "postgresql")


@dataclass(frozen=True)
class Proof:
    """faults: the checks that failed. figures: counts by name, for the report."""

    faults: Sequence[str]
    figures: Mapping[str, int | float | str]


def broken(checks: Mapping[str, object]) -> list[str]:
    """The names of the checks that failed."""
    faults = []
    for sentence, value in checks.items():
        if isinstance(value, Collection) and not isinstance(value, str) and value:
            shown = ", ".join(sorted(map(str, value))[:5])
            faults.append(f"{len(value)} {sentence}: {shown}")
        elif value:
            faults.append(sentence)
    return faults


@dataclass(frozen=True)
class Stage:
    """directory: an empty one. seed: decides what happens when."""

    cycles: int
    backend: str
    directory: Path
    seed: int

    @cached_property
    def chance(self) -> random.Random:
        return random.Random(self.seed)

    @cached_property
    def model(self) -> Path:
        """The demo's architecture with random weights, unless the test has put another model into `directory`/model."""
        path = self.directory / "model"
        return path if path.exists() else tiny_model(self.directory)

    @contextmanager
    def store(self) -> Iterator[tuple[str, ...]]:
        """Options of `ref-server serve` for the test's kind of store, which exists while the block runs."""
        if self.backend == "sqlite":
            yield ()
        else:
            with postgres() as cluster:
                yield ("--store", cluster.create_database("tandem"))

    def serving(self, *options: str, directory: Path | None = None) -> Server:
        """`ref-server serve` of the model, for a `with` statement."""
        return Server(self.model, directory or self.directory, *options)

    @contextmanager
    def serving_store(self, *options: str, directory: Path | None = None) -> Iterator[Server]:
        """The same, on a new store of the test's kind."""
        with self.store() as store, self.serving(*store, *options, directory=directory) as server:
            yield server


@contextmanager
def at_work(works: Sequence[Callable[[Event], object]]) -> Iterator[Event]:
    """Runs each on a thread, with the event that is set when the block ends. Then raises what one of them raised."""
    over = Event()
    with ThreadPoolExecutor(len(works)) as threads:
        running = [threads.submit(work, over) for work in works]
        try:
            yield over
        finally:
            over.set()
    for thread in running:
        thread.result()
