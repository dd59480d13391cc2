"""The stores of a queue, each empty at first, on clocks that a test moves."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Protocol

import pytest

from ref_server.config import QueueConfig
from ref_server.queue.postgres.store import PostgresQueue
from ref_server.queue.queue import Queue
from ref_server.queue.sqlite.store import SqliteQueue
from shared.api import LimitsView
from tests.harness.postgresql import Postgres, PostgresMissing, postgres

RETENTION = 1000.0
CLAIM_SECONDS = 60.0
# Opens a queue with these limits, closed with the test.
Open = Callable[..., Queue]


class Clock:
    """Seconds that pass only when a test advances them: the monotonic clock, and the wall clock with another origin."""

    def __init__(self) -> None:
        self.now = 5.0

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now


def make_limits(**changed: int) -> LimitsView:
    """The limits of a server without settings, but for those given."""
    return QueueConfig().limits.model_copy(update=changed)


class Backend(Protocol):
    """One store: what is opened again finds what was there."""

    def open(self, clock: Clock, limits: LimitsView) -> Queue: ...


class SqliteBackend:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "queue.sqlite"

    def open(self, clock: Clock, limits: LimitsView) -> Queue:
        return SqliteQueue(
            self.path, limits=limits, retention_seconds=RETENTION, clock=clock.monotonic, wall=clock.wall
        )


class PostgresBackend:
    def __init__(self, url: str) -> None:
        self.url = url

    def open(self, clock: Clock, limits: LimitsView) -> Queue:
        return PostgresQueue(
            self.url,
            limits=limits,
            retention_seconds=RETENTION,
            claim_seconds=CLAIM_SECONDS,
            upkeep_seconds=3600.0,  # so that only what a test does happens
            clock=lambda _: clock.wall(),
        )


@contextmanager
def sqlite_backend(folder: Path) -> Iterator[Backend]:
    yield SqliteBackend(folder)


@contextmanager
def postgres_backend(folder: Path) -> Iterator[PostgresBackend]:
    cluster = _cluster()
    database = f"test_{next(_numbers)}"
    yield PostgresBackend(cluster.create_database(database))
    cluster.execute(f"DROP DATABASE {database} WITH (FORCE)")


BACKENDS: dict[str, Callable[[Path], AbstractContextManager[Backend]]] = {
    "postgresql": postgres_backend,
    "sqlite": sqlite_backend,
}

# What a test takes as its parameters: PostgreSQL's half is as long again, and run by `make test-all`.
BACKEND_NAMES = (pytest.param("postgresql", marks=pytest.mark.slow), "sqlite")

_numbers = itertools.count()
_running = ExitStack()


@cache
def _cluster() -> Postgres:
    """One for the whole process, started at first use; conftest.py stops it."""
    try:
        return _running.enter_context(postgres(settings=("fsync = off", "max_connections = 200")))
    except PostgresMissing as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))


def stop_cluster() -> None:
    _running.close()
