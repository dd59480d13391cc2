"""Fixtures of the client's tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shared.client import RefServerClient
from tests.site import no_backoff, open_site

__all__ = ["no_backoff", "open_site"]


@pytest.fixture
def connect() -> Iterator[Callable[..., RefServerClient]]:
    """Opens clients, and closes them after the test."""
    clients: list[RefServerClient] = []

    def make(url: str, **options: Any) -> RefServerClient:
        clients.append(RefServerClient(url, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()
