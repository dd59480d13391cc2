"""Which store the settings ask for, and how it is told of."""

import pytest

from ref_server.cli.stores import describe_store
from ref_server.config import ServeConfig


@pytest.mark.parametrize(
    ("store", "told"),
    [
        ("sqlite", "sqlite in .tandem"),
        ("postgresql://me:secret@db.example:5433/queue", "postgresql queue on db.example:5433"),
        ("postgresql:///queue?user=me&password=secret", "postgresql queue on this machine:5432"),
    ],
)
def test_a_store_is_told_of_without_its_password(store: str, told: str) -> None:
    assert describe_store(ServeConfig(no_model=True, store=store)) == told
