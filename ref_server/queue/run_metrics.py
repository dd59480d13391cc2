"""SQL operations on the metrics that trainers report of their runs, and their bounds.

A curve is the records of one kind of a run's lineage, counted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import NamedTuple

from ref_server.queue.transaction import Transaction
from shared.api import Kind, MetricsRecord

# Bytes of records that one page has at most, unless those of a single step are more.
PAGE_BYTES = 8 * 2**20
# A curve with more records, or more bytes of them, is thinned out; the newest WHOLE stay.
MOST_RECORDS = 4096
MOST_BYTES = 64 * 2**20
WHOLE = 256
# Lineages and their bytes, in all and of one run: beyond them those go that were silent longest.
MOST_LINEAGES, MOST_BYTES_IN_ALL = 200, 2**30
MOST_LINEAGES_OF_RUN, MOST_BYTES_OF_RUN = 50, 2**28


class Point(NamedTuple):
    """A record, as JSON. at: Unix seconds."""

    step: int
    at: float
    record: str


@dataclass(frozen=True)
class Curve:
    """step: the latest. Times in Unix seconds."""

    run: str
    lineage: str
    kind: str
    records: int
    bytes: int
    step: int
    first_at: float
    updated_at: float

    @property
    def key(self) -> tuple[str, str, str]:
        return self.run, self.lineage, self.kind


COLUMNS = ", ".join(field.name for field in fields(Curve))
OF_CURVE = "run = ? AND lineage = ? AND kind = ?"


def page(tx: Transaction, key: tuple[str, ...], after: int, limit: int) -> list[Point]:
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


def of_step(tx: Transaction, run: str, lineage: str, step: int, kind: Kind | None) -> list[str]:
    condition, values = ("", ()) if kind is None else ("AND kind = ?", (kind,))
    records = f"SELECT record FROM metrics WHERE run = ? AND lineage = ? AND step = ? {condition} ORDER BY kind, name"
    return [record for (record,) in tx.rows(records, run, lineage, step, *values)]


def keep(tx: Transaction, run: str, lineage: str, records: Sequence[MetricsRecord], after: int | None) -> None:
    tx.db.serialise("metrics")
    tx.db.check_disk(sum(len(record.text) for record in records))
    if after is not None:
        _forget_later(tx, run, lineage, after)
    for kind in Kind:
        if of_kind := [record for record in records if record.kind is kind]:
            _thin_out(tx, _add(tx, (run, lineage, kind), of_kind))
    _make_room(tx, run)


def _add(tx: Transaction, key: tuple[str, str, str], records: Sequence[MetricsRecord]) -> Curve:
    new = Curve(*key, records=0, bytes=0, step=0, first_at=tx.at, updated_at=tx.at)
    tx.execute(f"INSERT INTO curves ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", *astuple(new))
    curve = Curve(*tx.value(f"SELECT {COLUMNS} FROM curves WHERE {OF_CURVE}", *key))
    sizes = [_put(tx, key, record) for record in records]
    grown = replace(
        curve,
        records=curve.records + sum(more for more, _ in sizes),
        bytes=curve.bytes + sum(size for _, size in sizes),
        step=max(curve.step, *(record.step for record in records)),
        updated_at=tx.at,
    )
    return _write(tx, grown)


def _put(tx: Transaction, key: tuple[str, str, str], record: MetricsRecord) -> tuple[int, int]:
    """Returns how many records and bytes there are more. A record that is there already keeps its time."""
    place, text = (*key, record.step, record.name or ""), record.text
    old: str | None = tx.value(f"SELECT record FROM metrics WHERE {OF_CURVE} AND step = ? AND name = ?", *place)
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
    for curve in find(tx, run):
        if curve.lineage != lineage or curve.step <= after:
            continue
        later = f"DELETE FROM metrics WHERE {OF_CURVE} AND step > ? RETURNING length(record)"
        left = _without(tx, curve, tx.rows(later, *curve.key, after))
        if left.records:
            latest = tx.value(f"SELECT max(step) FROM metrics WHERE {OF_CURVE}", *curve.key)
            _write(tx, replace(left, step=latest))
        else:
            tx.execute(f"DELETE FROM curves WHERE {OF_CURVE}", *curve.key)


def find(tx: Transaction, run: str | None) -> list[Curve]:
    condition, values = ("", ()) if run is None else ("WHERE run = ?", (run,))
    curves = [Curve(*row) for row in tx.rows(f"SELECT {COLUMNS} FROM curves {condition}", *values)]
    return sorted(curves, key=lambda curve: (-curve.updated_at, curve.key))


def _thin_out(tx: Transaction, curve: Curve) -> None:
    """Keeps every second, fourth, eighth … of the older steps, so that what is left has the same distances."""
    while curve.records > MOST_RECORDS or curve.bytes > MOST_BYTES:
        room = curve.records * 3 // 4
        steps = [step for (step,) in tx.rows(f"SELECT step FROM metrics WHERE {OF_CURVE} ORDER BY step", *curve.key)]
        stride, before = stride_of(steps, room), steps[-min(WHOLE, room)]
        between = f"DELETE FROM metrics WHERE {OF_CURVE} AND step < ? AND step / ? * ? <> step RETURNING length(record)"
        left = _without(tx, curve, tx.rows(between, *curve.key, before, stride, stride))
        if left.records > room:  # many records of one step
            first = f"SELECT step, name FROM metrics WHERE {OF_CURVE} ORDER BY step, name LIMIT ?"
            gone = f"DELETE FROM metrics WHERE {OF_CURVE} AND (step, name) IN ({first}) RETURNING length(record)"
            left = _without(tx, left, tx.rows(gone, *curve.key, *curve.key, left.records - room))
        curve = left


def stride_of(steps: Sequence[int], room: int) -> int:
    """The least power of two so that its multiples among the older steps, and the newest, are at most `room`.

    steps: rising; the newest WHOLE of them stay. Where no power suffices, a large one.
    """
    newest = min(WHOLE, room)
    old = steps[:-newest]
    powers = (1 << exponent for exponent in range(1, 62))
    return next((power for power in powers if newest + sum(step % power == 0 for step in old) <= room), 1 << 62)


def _without(tx: Transaction, curve: Curve, gone: Sequence[tuple[int]]) -> Curve:
    """gone: the lengths of the records that were deleted."""
    size = sum(length for (length,) in gone)
    return _write(tx, replace(curve, records=curve.records - len(gone), bytes=curve.bytes - size))


def _write(tx: Transaction, curve: Curve) -> Curve:
    changed = f"UPDATE curves SET records = ?, bytes = ?, step = ?, updated_at = ? WHERE {OF_CURVE}"
    tx.execute(changed, curve.records, curve.bytes, curve.step, curve.updated_at, *curve.key)
    return curve


def _lineages(curves: Iterable[Curve]) -> list[list[Curve]]:
    """The curves of each lineage; the lineage that has been silent longest comes first."""
    by_lineage: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        by_lineage.setdefault((curve.run, curve.lineage), []).append(curve)
    return sorted(by_lineage.values(), key=_updated_at)


def _updated_at(lineage: Sequence[Curve]) -> float:
    return max(curve.updated_at for curve in lineage)


def _bytes_of(lineage: Sequence[Curve]) -> int:
    return sum(curve.bytes for curve in lineage)


def _make_room(tx: Transaction, run: str) -> None:
    _drop_silent(tx, _lineages(find(tx, run)), MOST_LINEAGES_OF_RUN, MOST_BYTES_OF_RUN)
    _drop_silent(tx, _lineages(find(tx, None)), MOST_LINEAGES, MOST_BYTES_IN_ALL)


def _drop_silent(tx: Transaction, lineages: Sequence[Sequence[Curve]], most: int, most_bytes: int) -> None:
    left, size = len(lineages), sum(map(_bytes_of, lineages))
    for lineage in lineages:
        if left <= most and size <= most_bytes:
            return
        _drop(tx, lineage)
        left, size = left - 1, size - _bytes_of(lineage)


def _drop(tx: Transaction, lineage: Sequence[Curve]) -> None:
    tx.execute("DELETE FROM curves WHERE run = ? AND lineage = ?", lineage[0].run, lineage[0].lineage)


def forget(tx: Transaction, silent_since: float) -> bool:
    """Forgets the lineage that has been silent longest, if it has been silent since then. Returns whether it did."""
    lineages = _lineages(find(tx, None))
    if not lineages or _updated_at(lineages[0]) >= silent_since:
        return False
    _drop(tx, lineages[0])
    return True
