"""A queue of each backend, and the end of the PostgreSQL that these tests share."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ref_server.queue.queue import Queue
from tests.ref_server.queue.backends import BACKEND_NAMES, BACKENDS, Backend, Clock, Open, make_limits, stop_cluster


@pytest.fixture(scope="session", autouse=True)
def cluster_ends() -> Iterator[None]:
    yield
    stop_cluster()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=BACKEND_NAMES)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    with BACKENDS[request.param](tmp_path) as backend:
        yield backend


@pytest.fixture
def open_queue(backend: Backend, clock: Clock) -> Iterator[Open]:
    with ExitStack() as opened:

        def open_with(**limits: int) -> Queue:
            return opened.enter_context(closing(backend.open(clock, make_limits(**limits))))

        yield open_with


@pytest.fixture
def queue(open_queue: Open, request: pytest.FixtureRequest) -> Queue:
    """With the `LIMITS` of the test's module, where it has some."""
    return open_queue(**getattr(request.module, "LIMITS", {}))
