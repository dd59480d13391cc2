"""SQL operations on the reference that the servers of a queue are to score with."""

from ref_server.queue.records import WantedReference
from ref_server.queue.transaction import Transaction


def want(tx: Transaction, wanted: WantedReference) -> WantedReference:
    tx.execute(
        """
        INSERT INTO reference (one, snapshot, version, base) VALUES (1, ?, ?, ?)
        ON CONFLICT (one) DO UPDATE
        SET snapshot = excluded.snapshot, version = excluded.version, base = excluded.base
        WHERE reference.version < excluded.version
        """,
        wanted.snapshot,
        wanted.version,
        wanted.base,
    )
    return find(tx) or wanted


def find(tx: Transaction) -> WantedReference | None:
    row = tx.one("SELECT snapshot, version, base FROM reference")
    return None if row is None else WantedReference(*row)


def is_wanted(tx: Transaction, version: int) -> bool:
    """Whether a server whose weights have this version may score: no other is wanted."""
    wanted = find(tx)
    return wanted is None or wanted.version == version
