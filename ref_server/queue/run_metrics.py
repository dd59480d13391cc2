"""The metrics that trainers report of their runs, in SQL: `Queue.metrics` of both stores. `curves.py` bounds them."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import NamedTuple, Protocol, TypeVar

from ref_server.queue import curves
from ref_server.queue.curves import COLUMNS, OF_CURVE, Curve
from ref_server.queue.transaction import Transaction
from shared.api import Kind, MetricsRecord

T = TypeVar("T")

# Bytes of records that one page has at most, unless those of a single step are more.
PAGE_BYTES = 8 * 2**20


class Run(Protocol):
    """`SqlQueue._run`: an operation in a transaction of its own."""

    def __call__(self, operation: Callable[[Transaction], T], *, durable: bool = False, stores: bool = False) -> T: ...


class Point(NamedTuple):
    """A record, as JSON. at: Unix seconds."""

    step: int
    at: float
    record: str


class RunMetrics:
    """Each method is one transaction. The newest ones may be lost at a power cut: the trainer has them, too."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def keep(self, run: str, lineage: str, records: Sequence[MetricsRecord], after: int | None = None) -> None:
        """Stores records; each replaces an earlier one of its kind, step and name.

        after: first forgets those of later steps. Raises StorageFull.
        """
        self._run(lambda tx: _keep(tx, run, lineage, records, after), stores=True)

    def curves(self, run: str | None = None) -> list[Curve]:
        """Of all runs, or of one; the latest updated first."""
        return self._run(lambda tx: curves.find(tx, run))

    def page(self, run: str, lineage: str, kind: Kind, after: int, limit: int) -> list[Point]:
        """The records of the next steps, at most `limit` steps and about PAGE_BYTES, by step."""
        return self._run(lambda tx: _page(tx, (run, lineage, kind), after, limit))

    def of_step(self, run: str, lineage: str, step: int) -> list[str]:
        """The records of one step, of all kinds, as JSON."""
        found = "SELECT record FROM metrics WHERE run = ? AND lineage = ? AND step = ? ORDER BY kind, name"
        return self._run(lambda tx: [record for (record,) in tx.rows(found, run, lineage, step)])


def _page(tx: Transaction, key: tuple[str, ...], after: int, limit: int) -> list[Point]:
    steps = tx.rows(
        f"SELECT step, CAST(sum(length(record)) AS BIGINT) FROM metrics WHERE {OF_CURVE} AND step > ? "
        "GROUP BY step ORDER BY step LIMIT ?",
        *key,
        after,
        limit,
    )
    last, size = after, 0
    for step, length in steps:
        size += length
        if last > after and size > PAGE_BYTES:
            break
        last = step
    of_steps = f"SELECT step, at, record FROM metrics WHERE {OF_CURVE} AND step > ? AND step <= ? ORDER BY step, name"
    return [Point(*row) for row in tx.rows(of_steps, *key, after, last)]


def _keep(tx: Transaction, run: str, lineage: str, records: Sequence[MetricsRecord], after: int | None) -> None:
    tx.db.serialise("metrics")
    tx.db.check_disk(sum(len(record.text) for record in records))
    if after is not None:
        _forget_later(tx, run, lineage, after)
    for kind in Kind:
        if own := [record for record in records if record.kind is kind]:
            curves.thin_out(tx, _add(tx, (run, lineage, kind), own))
    curves.make_room(tx, run)


def _add(tx: Transaction, key: tuple[str, str, str], records: Sequence[MetricsRecord]) -> Curve:
    new = Curve(*key, records=0, bytes=0, step=0, first_at=tx.at, updated_at=tx.at)
    tx.execute(f"INSERT INTO curves ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", *astuple(new))
    curve = Curve(*tx.one(f"SELECT {COLUMNS} FROM curves WHERE {OF_CURVE}", *key))
    sizes = [_put(tx, key, record) for record in records]
    grown = replace(
        curve,
        records=curve.records + sum(more for more, _ in sizes),
        bytes=curve.bytes + sum(size for _, size in sizes),
        step=max(curve.step, *(record.step for record in records)),
        updated_at=tx.at,
    )
    return curves.write(tx, grown)


def _put(tx: Transaction, key: tuple[str, str, str], record: MetricsRecord) -> tuple[int, int]:
    """Returns how many records and bytes there are more. A record that is there already keeps its time."""
    place, text = (*key, record.step, record.name or ""), record.text
    old: str | None = tx.one(f"SELECT record FROM metrics WHERE {OF_CURVE} AND step = ? AND name = ?", *place)
    if old != text:
        tx.execute(
            "INSERT INTO metrics (run, lineage, kind, step, name, at, record) VALUES (?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (run, lineage, kind, step, name) DO UPDATE SET at = excluded.at, record = excluded.record",
            *place,
            tx.at,
            text,
        )
    return (1, len(text)) if old is None else (0, len(text) - len(old))


def _forget_later(tx: Transaction, run: str, lineage: str, after: int) -> None:
    for curve in curves.find(tx, run):
        if curve.lineage != lineage or curve.step <= after:
            continue
        later = f"DELETE FROM metrics WHERE {OF_CURVE} AND step > ? RETURNING length(record)"
        left = curves.without(tx, curve, tx.rows(later, *curve.key, after))
        if left.records:
            latest = tx.one(f"SELECT max(step) FROM metrics WHERE {OF_CURVE}", *curve.key)
            curves.write(tx, replace(left, step=latest))
        else:
            tx.execute(f"DELETE FROM curves WHERE {OF_CURVE}", *curve.key)
