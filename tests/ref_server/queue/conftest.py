"""Ends the PostgreSQL that the tests of the queue share."""

from collections.abc import Iterator

import pytest

from tests.ref_server.queue.backends import stop_cluster


@pytest.fixture(scope="session", autouse=True)
def cluster_ends() -> Iterator[None]:
    yield
    stop_cluster()
