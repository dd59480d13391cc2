"""Looking into a queue in SQL without changing it."""

import re
from typing import Any

from ref_server.queue.batches import WAITING
from ref_server.queue.interface import CURSOR, BatchInfo, Depth, Event, Page, State, Stats
from ref_server.queue.transaction import Transaction

# In the order of BatchInfo's fields.
_INFO = """
    SELECT id, run, epoch, policy_version, state, reason, admitted_at, prompt_tokens, completion_tokens, completions,
           payload_bytes, deliveries, scoring_attempts, consumer, seq
    FROM batches
"""


def get(tx: Transaction, id: str) -> BatchInfo | None:
    row = tx.one(f"{_INFO} WHERE id = ?", id)
    if row is None:
        return None
    events = tx.rows("SELECT at, state, detail FROM events WHERE seq = ? ORDER BY number", row[-1])
    return _info(row, tuple(Event(at, State(state), detail) for at, state, detail in events))


def payload(tx: Transaction, id: str) -> bytes | None:
    return tx.one("SELECT body FROM payloads JOIN batches USING (seq) WHERE id = ?", id)


def page(tx: Transaction, state: State | None, run: str | None, limit: int, cursor: str | None) -> Page:
    conditions = {"seq > ?": _parse_cursor(cursor), "state = ?": state, "run = ?": run}
    given = {condition: value for condition, value in conditions.items() if value is not None}
    rows = tx.rows(f"{_INFO} WHERE {' AND '.join(given)} ORDER BY seq LIMIT ?", *given.values(), limit + 1)
    return Page(
        batches=tuple(_info(row) for row in rows[:limit]),
        next_cursor=f"{rows[limit - 1][-1]:x}" if len(rows) > limit else None,
    )


def stats(tx: Transaction) -> Stats:
    depths = tx.rows(
        """
        SELECT run, state, CAST(sum(batches) AS BIGINT), CAST(sum(payload_bytes) AS BIGINT) FROM depths
        GROUP BY run, state HAVING sum(batches) > 0 ORDER BY run, state
        """
    )
    admitted = [_oldest_admission(tx, state) for state in (State.QUEUED, State.SCORING, State.READY)]
    ages = [max(0.0, tx.at - at) for at in admitted if at is not None]
    waiting = "SELECT CAST(sum(batches) AS BIGINT), CAST(sum(payload_bytes) AS BIGINT) FROM depths"
    batches, size = tx.one(f"{waiting} WHERE {WAITING}")
    return Stats(
        depths=tuple(Depth(run, State(state), count, size) for run, state, count, size in depths),
        oldest_age=max(ages, default=None),
        waiting_batches=batches or 0,
        waiting_bytes=size or 0,
    )


def _oldest_admission(tx: Transaction, state: State) -> float | None:
    return tx.one("SELECT admitted_at FROM batches WHERE state = ? ORDER BY seq LIMIT 1", state)


def _parse_cursor(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not re.fullmatch(CURSOR, cursor):
        raise ValueError(f"cursor must be a next_cursor that this queue gave, got {cursor[:40]!r}")
    return int(cursor, 16)


def _info(row: tuple[Any, ...], history: tuple[Event, ...] = ()) -> BatchInfo:
    id, run, epoch, version, state, *rest, _seq = row
    return BatchInfo(id, run, epoch, version, State(state), *rest, history=history)
