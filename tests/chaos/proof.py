"""The result of a chaos test: one line of the report."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.postgresql import postgres

BACKENDS = ("sqlite", "postgresql")


@dataclass(frozen=True)
class Proof:
    """One promise (`bar`) and whether it held. figures: counts by name."""

    name: str
    backend: str
    bar: str
    passed: bool
    figures: Mapping[str, int | float | str] = field(default_factory=dict)


@contextmanager
def store_options(backend: str) -> Iterator[tuple[str, ...]]:
    """Options of `ref-server serve` for a store of this kind, which exists while the block runs."""
    if backend == "sqlite":
        yield ()
    else:
        with postgres() as cluster:
            yield ("--store", cluster.create_database("tandem"))
