"""The context of one SQL operation: the connection, the limits, and a fixed time.

Each operation is written once, in SQL that SQLite and PostgreSQL share. The two differ in locks, which a `Database`
provides.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from ref_server.metrics import Count
from shared.api import LimitsView, State

# Of a batch's history the first events, and as many of the newest, are kept.
KEPT_EVENTS = 50

Value = str | int | float | bool | bytes | None


class Database(Protocol):
    """A connection inside a transaction. `?` is the placeholder for values."""

    lock: str
    """SQL suffix of a SELECT that locks its rows: other transactions wait for them."""
    skip_locked: str
    """The same, but skips rows that another transaction has locked."""

    def rows(self, sql: str, values: tuple[Value, ...]) -> list[tuple[Any, ...]]:
        """Runs a statement and returns its rows, if any."""
        ...

    def check_disk(self, size: int) -> None:
        """Raises StorageFull when the disk has too little room for an upload of `size` bytes."""
        ...

    def serialise(self, name: str) -> None:
        """Takes a lock of this name until the transaction ends; others that ask for it wait."""
        ...


@dataclass(frozen=True)
class Transaction:
    """now: seconds on the clock of leases. at: Unix seconds, for people and for retention.

    scorer: id of the server that claims. claim_seconds: how long a claim lasts unless renewed; None: until the process
    ends. counts, ready_after: see `Activity.add`, which gets them after the commit.
    """

    db: Database
    limits: LimitsView
    now: float
    at: float
    scorer: str
    claim_seconds: float | None
    counts: Counter[Count] = field(default_factory=Counter)
    ready_after: list[float] = field(default_factory=list)

    @property
    def claim_expires(self) -> float | None:
        """When a claim made or renewed now expires, on the clock of `now`; None: never."""
        return None if self.claim_seconds is None else self.now + self.claim_seconds

    def count(self, what: Count, times: int = 1) -> None:
        self.counts[what] += times

    def execute(self, sql: str, *values: Value) -> None:
        self.db.rows(sql, values)

    def rows(self, sql: str, *values: Value) -> list[tuple[Any, ...]]:
        return self.db.rows(sql, values)

    def value(self, sql: str, *values: Value) -> Any:
        """The first row of a query, or its value if it has one column; None if there is no row."""
        row = next(iter(self.db.rows(sql, values)), None)
        return row[0] if row is not None and len(row) == 1 else row

    def find(self, id: str, columns: str) -> tuple[Any, ...]:
        """Reads these columns of a batch and locks its row. Raises KeyError if the batch is unknown."""
        row = next(iter(self.rows(f"SELECT {columns} FROM batches WHERE id = ? {self.db.lock}", id)), None)
        if row is None:
            raise KeyError(id)
        return row

    def move(self, seq: int, state: State, detail: str = "", **columns: Value) -> None:
        """Moves a batch to `state`, sets `columns` with it, and adds an event to its history."""
        columns["state"] = state
        if state in (State.DONE, State.EXPIRED, State.DEAD):
            columns["settled_at"] = self.at
        assignments = ", ".join(f"{column} = ?" for column in columns)
        self.execute(f"UPDATE batches SET {assignments} WHERE seq = ?", *columns.values(), seq)
        self.note([seq], state, detail)

    def note(self, seqs: Collection[int], state: State, detail: str = "") -> None:
        """Adds an event to the history of each batch. seqs: at least one."""
        events = [value for seq in seqs for value in (seq, self.at, state, detail)]
        rows = several("(?, ?, ?, ?)", seqs)
        self.execute(f"INSERT INTO events (seq, at, state, detail) VALUES {rows}", *events)

    def shorten_history(self, seq: int) -> None:
        """Keeps the first and the newest events of a batch that comes and goes; those between are forgotten."""
        numbers = "SELECT number FROM events WHERE seq = ? ORDER BY number"
        self.execute(
            f"DELETE FROM events WHERE seq = ? AND number > ({numbers} LIMIT 1 OFFSET {KEPT_EVENTS - 1}) "
            f"AND number < ({numbers} DESC LIMIT 1 OFFSET {KEPT_EVENTS - 1})",
            seq,
            seq,
            seq,
        )


def several(placeholder: str, values: Collection[object]) -> str:
    """The placeholder once for each value, for a statement about all of them."""
    return ", ".join([placeholder] * len(values))
