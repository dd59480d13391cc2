"""SQL operations that time alone calls for: batches that nobody leases expire, and what is long over is forgotten.

Each call does a slice of bounded size, so that no transaction holds up others.
"""

from ref_server.metrics.activity import Count
from ref_server.queue import batches, curves
from ref_server.queue.indexes import WAITING
from ref_server.queue.transaction import Transaction

# The most rows of a kind that one call changes.
SLICE = 200
# A run without batches is forgotten after this silence, in seconds.
SILENCE_SECONDS = 3600.0


def tidy(tx: Transaction, retention_seconds: float, max_waiting_seconds: float) -> bool:
    """Does a slice of all that is due. Returns whether more may be left."""
    forgotten = tx.at - retention_seconds
    done = (
        _forget_batches(tx, forgotten),
        _forget_incarnations(tx, forgotten),
        _forget_runs(tx),
        _expire_unused(tx, tx.at - max_waiting_seconds),
    )
    return curves.forget(tx, forgotten) or SLICE in done


def _forget_batches(tx: Transaction, settled_before: float) -> int:
    over = f"SELECT seq FROM batches WHERE settled_at < ? ORDER BY settled_at LIMIT {SLICE} {tx.db.skip_locked}"
    return len(tx.rows(f"DELETE FROM batches WHERE seq IN ({over}) RETURNING seq", settled_before))


def _forget_incarnations(tx: Transaction, seen_before: float) -> int:
    over = f"SELECT number FROM incarnations WHERE seen_at < ? ORDER BY number LIMIT {SLICE}"
    return len(tx.rows(f"DELETE FROM incarnations WHERE number IN ({over}) RETURNING number", seen_before))


def _forget_runs(tx: Transaction) -> int:
    """Forgets whose a run was, and its epochs, once no batch of the run is known and its lineage is silent."""
    used = "SELECT run FROM depths GROUP BY run HAVING sum(batches) > 0"
    silent = "heard + seconds <= ? AND heard <= ?"
    since = (tx.now, tx.now - SILENCE_SECONDS)
    over = f"SELECT run FROM runs WHERE {silent} AND run NOT IN ({used}) ORDER BY run LIMIT {SLICE}"
    # Asks again who is silent: on PostgreSQL a lineage may come back meanwhile.
    gone = tx.rows(f"DELETE FROM runs WHERE {silent} AND run IN ({over}) RETURNING run", *since, *since)
    for (run,) in gone:
        tx.execute("DELETE FROM epochs WHERE run = ?", run)
    return len(gone)


def _expire_unused(tx: Transaction, untouched_since: float) -> int:
    """Expires batches that wait, and to which nothing has happened since, and deletes their payloads."""
    touched = "SELECT max(at) FROM events WHERE events.seq = batches.seq"
    over = tx.rows(
        f"SELECT seq FROM batches WHERE {WAITING} AND admitted_at < ? AND ({touched}) < ? "
        f"ORDER BY admitted_at LIMIT {SLICE} {tx.db.skip_locked}",
        untouched_since,
        untouched_since,
    )
    for (seq,) in over:
        batches.expire(tx, seq, "unused")
        tx.count(Count.EXPIRED_UNUSED)
    return len(over)
