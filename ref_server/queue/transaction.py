"""What one operation on a queue in SQL sees: the store, the bounds, and a moment that stands still.

The operations are written once, in the SQL that SQLite and PostgreSQL share. Where the two differ, in locks, a
`Database` answers.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from ref_server.metrics.activity import Count, Tally
from shared.api import LimitsView, State

Value = str | int | float | bool | bytes | None


class Database(Protocol):
    """A connection inside a transaction. Values stand as `?` in the SQL."""

    lock: str
    """Ends a SELECT whose rows are about to change: others wait for them."""
    skip_locked: str
    """The same, but rows that another transaction holds are left out."""

    def rows(self, sql: str, values: tuple[Value, ...]) -> list[tuple[Any, ...]]:
        """All that a statement returns; nothing for one that returns nothing."""
        ...

    def serialise(self, name: str) -> None:
        """From here to the end of the transaction, nobody else who asks for the same name."""
        ...


@dataclass(frozen=True)
class Transaction:
    """now: seconds on the clock of leases. at: Unix seconds, for people and for retention.

    scorer: whose claims these are. claim_seconds: how long a claim holds unless renewed; None when it ends with the
    process only. tally: what this transaction does, to be counted once it is committed.
    """

    db: Database
    limits: LimitsView
    now: float
    at: float
    scorer: str
    claim_seconds: float | None
    tally: Tally = field(default_factory=Tally)

    @property
    def claim_expires(self) -> float | None:
        """When a claim that is made or renewed now runs out."""
        return None if self.claim_seconds is None else self.now + self.claim_seconds

    def count(self, what: Count) -> None:
        self.tally.counts[what] += 1

    def execute(self, sql: str, *values: Value) -> None:
        self.db.rows(sql, values)

    def rows(self, sql: str, *values: Value) -> list[tuple[Any, ...]]:
        return self.db.rows(sql, values)

    def one(self, sql: str, *values: Value) -> Any:
        """The one row that a query finds, or its value where it has but one column; None when it finds none."""
        row = next(iter(self.db.rows(sql, values)), None)
        return row[0] if row is not None and len(row) == 1 else row

    def move(self, seq: int, state: State, detail: str = "", **columns: Value) -> None:
        """Brings a batch into a state, sets the columns that change with it, and writes a line of its history."""
        columns["state"] = state
        if state in (State.DONE, State.EXPIRED, State.DEAD):
            columns["settled_at"] = self.at
        assignments = ", ".join(f"{column} = ?" for column in columns)
        self.execute(f"UPDATE batches SET {assignments} WHERE seq = ?", *columns.values(), seq)
        self.note(seq, state, detail)

    def note(self, seq: int, state: State, detail: str = "") -> None:
        self.execute("INSERT INTO events (seq, at, state, detail) VALUES (?, ?, ?, ?)", seq, self.at, state, detail)
