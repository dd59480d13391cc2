"""SQL queries that read the queue without changing it."""

import re
from collections.abc import Sequence
from typing import Any

import structlog
from pydantic import ValidationError

from ref_server.queue.limits import COUNTED
from ref_server.queue.records import Payload, Stats
from ref_server.queue.transaction import Transaction, several
from shared.api import CURSOR, BatchDetails, BatchPage, BatchSummary, Depth, Event, ListOrder, State

log = structlog.get_logger()

# The columns are named like the record's fields.
_FIELDS = tuple(BatchSummary.model_fields)
_SUMMARIES = f"SELECT {', '.join(_FIELDS)}, seq FROM batches"
# Few of the done batches have a payload: CROSS makes SQLite go through the payloads.
_KEPT = f"SELECT {', '.join(_FIELDS)}, batches.seq FROM payloads CROSS JOIN batches"
# By order: which seqs come after a cursor's, and how they are sorted; where the first page begins.
_DIRECTIONS = {ListOrder.OLDEST: (">", "ASC"), ListOrder.NEWEST: ("<", "DESC")}
_BEGINNINGS = {ListOrder.OLDEST: 0, ListOrder.NEWEST: 2**63 - 1}


def get(tx: Transaction, id: str) -> BatchDetails | None:
    row = tx.value(f"{_SUMMARIES} WHERE id = ?", id)
    if row is None:
        return None
    *values, seq = row
    events = tx.rows("SELECT at, state, detail FROM events WHERE seq = ? ORDER BY number", seq)
    history = [Event(at=at, state=state, detail=detail) for at, state, detail in events]
    return BatchDetails(**dict(zip(_FIELDS, values, strict=True)), history=history)


def runs_of(tx: Transaction, ids: Sequence[str]) -> set[str]:
    runs = (tx.value("SELECT run FROM batches WHERE id = ?", id) for id in ids)
    return {run for run in runs if run is not None}


def payloads(tx: Transaction, ids: Sequence[str]) -> dict[str, Payload]:
    rows = tx.rows(
        f"""
        SELECT id, payloads.body, scores.body FROM batches JOIN payloads USING (seq) LEFT JOIN scores USING (seq)
        WHERE id IN ({several("?", ids)})
        """,
        *ids,
    )
    return {id: Payload(*row) for id, *row in rows}


def page(
    tx: Transaction,
    state: State | None,
    run: str | None,
    limit: int,
    cursor: str | None,
    order: ListOrder,
    kept: bool = False,
) -> BatchPage:
    beyond, direction = _DIRECTIONS[order]
    source, place, joined = (
        (_KEPT, "payloads.seq", "batches.seq = payloads.seq AND ") if kept else (_SUMMARIES, "seq", "")
    )
    conditions = {f"{joined}{place} {beyond} ?": parse_cursor(cursor, order), "state = ?": state, "run = ?": run}
    given = {condition: value for condition, value in conditions.items() if value is not None}
    rows = tx.rows(
        f"{source} WHERE {' AND '.join(given)} ORDER BY {place} {direction} LIMIT ?", *given.values(), limit + 1
    )
    return BatchPage(
        batches=[summary for *values, _ in rows[:limit] if (summary := _summary(values))],
        next_cursor=f"{rows[limit - 1][-1]:x}" if len(rows) > limit else None,
    )


def _summary(values: Sequence[Any]) -> BatchSummary | None:
    """None for a damaged row, or one that another version wrote: it must not hide the others."""
    row = dict(zip(_FIELDS, values, strict=True))
    try:
        return BatchSummary(**row)
    except ValidationError as error:
        log.error("the row of a batch is damaged, and is left out of lists", id=row["id"], error=str(error))
        return None


def stats(tx: Transaction) -> Stats:
    runs: dict[str, dict[State, Depth]] = {}
    for run, state, batches, size in tx.rows(
        """
        SELECT run, state, CAST(sum(batches) AS BIGINT), CAST(sum(payload_bytes) AS BIGINT) FROM depths
        GROUP BY run, state HAVING sum(batches) > 0 ORDER BY run, state
        """
    ):
        if state in {*State}:  # else damaged: lists name the batch in the log
            runs.setdefault(run, {})[State(state)] = Depth(batches=batches, bytes=size)
    oldest = "SELECT admitted_at FROM batches WHERE state = ? ORDER BY seq LIMIT 1"
    admitted = [tx.value(oldest, state) for state in (State.QUEUED, State.SCORING, State.READY)]
    ages = [max(0.0, tx.at - at) for at in admitted if at is not None]
    waiting = "SELECT CAST(sum(batches) AS BIGINT), CAST(sum(payload_bytes) AS BIGINT) FROM depths"
    batches, size = tx.value(f"{waiting} WHERE {COUNTED}")
    return Stats(
        runs=runs,
        oldest_age=max(ages, default=None),
        waiting_batches=batches or 0,
        waiting_bytes=size or 0,
    )


def parse_cursor(cursor: str | None, order: ListOrder) -> int:
    if cursor is None:
        return _BEGINNINGS[order]
    if not re.fullmatch(CURSOR, cursor):
        raise ValueError(f"cursor must be a next_cursor that this queue gave, got {cursor[:40]!r}")
    return int(cursor, 16)
