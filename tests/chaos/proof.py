"""The result of a chaos test: one line of the report."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tests.postgresql import postgres

BACKENDS = ("sqlite", "postgresql")


@dataclass(frozen=True)
class Proof:
    """One promise (`bar`), which held if there are no faults. figures: counts by name."""

    name: str
    backend: str
    bar: str
    faults: Sequence[str]
    figures: Mapping[str, int | float | str]


def broken(checks: Mapping[str, object]) -> list[str]:
    """The sentences of the checks whose value is true: what must not be, but is."""
    return [sentence for sentence, holds in checks.items() if holds]


@contextmanager
def store_options(backend: str) -> Iterator[tuple[str, ...]]:
    """Options of `ref-server serve` for a store of this kind, which exists while the block runs."""
    if backend == "sqlite":
        yield ()
    else:
        with postgres() as cluster:
            yield ("--store", cluster.create_database("tandem"))
