"""What one operation on the SQLite queue sees: the store, the bounds, and a moment that stands still."""

from dataclasses import dataclass
from typing import Any

import apsw

from ref_server.queue.interface import Limits, State

Value = str | int | float | bytes | None


@dataclass(frozen=True)
class Transaction:
    """now: seconds on the monotonic clock, for leases. at: Unix seconds, for people and for retention."""

    db: apsw.Connection
    limits: Limits
    now: float
    at: float

    def execute(self, sql: str, *values: Value) -> None:
        self.db.execute(sql, values)

    def rows(self, sql: str, *values: Value) -> list[Any]:
        return self.db.execute(sql, values).fetchall()

    def one(self, sql: str, *values: Value) -> Any:
        """The one row that a query finds, or its value where it has but one column; None when it finds none."""
        return self.db.execute(sql, values).get

    def move(self, seq: int, state: State, detail: str = "", **columns: Value) -> None:
        """Brings a batch into a state, sets the columns that change with it, and writes a line of its history."""
        columns["state"] = state
        if state in (State.DONE, State.EXPIRED, State.DEAD):
            columns["settled_at"] = self.at
        assignments = ", ".join(f"{column} = ?" for column in columns)
        self.execute(f"UPDATE batches SET {assignments} WHERE seq = ?", *columns.values(), seq)
        self.note(seq, state, detail)

    def note(self, seq: int, state: State, detail: str = "") -> None:
        self.execute("INSERT INTO events VALUES (?, ?, ?, ?)", seq, self.at, state, detail)
