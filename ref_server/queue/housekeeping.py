"""SQL operations on many batches: what time requires (unused batches expire, settled ones are forgotten), and purge.

Each call does a slice of bounded size, so that no transaction holds up others.
"""

from ref_server.metrics import Count
from ref_server.queue import batches, run_metrics
from ref_server.queue.catalog import parse_cursor
from ref_server.queue.payloads import BYTES_AT_ONCE
from ref_server.queue.schema import WAITING
from ref_server.queue.transaction import Transaction
from shared.api import ListOrder, PurgeBody, Purged, State

# The most rows of a kind that one call changes.
SLICE = 200
# A run without batches is forgotten after this silence, in seconds.
SILENCE_SECONDS = 3600.0
# The most batches of a state that one call of `purge` reads, whether they are chosen or not.
LOOKED_AT = 1000


def tidy(tx: Transaction, retention_seconds: float, max_waiting_seconds: float) -> bool:
    """Does a slice of all that is due. Returns whether more may be left."""
    forgotten = tx.at - retention_seconds
    done = (
        _forget_batches(tx, forgotten),
        _forget_incarnations(tx, forgotten),
        _forget_runs(tx),
        _expire_unused(tx, tx.at - max_waiting_seconds),
    )
    return run_metrics.forget(tx, forgotten) or SLICE in done


def _forget_batches(tx: Transaction, settled_before: float) -> int:
    over = f"SELECT seq FROM batches WHERE settled_at < ? ORDER BY settled_at LIMIT {SLICE} {tx.db.skip_locked}"
    return len(tx.rows(f"DELETE FROM batches WHERE seq IN ({over}) RETURNING seq", settled_before))


def _forget_incarnations(tx: Transaction, seen_before: float) -> int:
    over = f"SELECT number FROM incarnations WHERE seen_at < ? ORDER BY number LIMIT {SLICE}"
    return len(tx.rows(f"DELETE FROM incarnations WHERE number IN ({over}) RETURNING number", seen_before))


def _forget_runs(tx: Transaction) -> int:
    """Forgets which lineage owned a run, and its epochs, once the run has no batches and its lineage is silent."""
    used = "SELECT run FROM depths GROUP BY run HAVING sum(batches) > 0"
    silent = "heard + seconds <= ? AND heard <= ?"
    since = (tx.now, tx.now - SILENCE_SECONDS)
    over = f"SELECT run FROM runs WHERE {silent} AND run NOT IN ({used}) ORDER BY run LIMIT {SLICE}"
    # The condition is repeated: on PostgreSQL a lineage may come back in the meantime.
    gone = tx.rows(f"DELETE FROM runs WHERE {silent} AND run IN ({over}) RETURNING run", *since, *since)
    for (run,) in gone:
        tx.execute("DELETE FROM epochs WHERE run = ?", run)
    return len(gone)


def _expire_unused(tx: Transaction, untouched_since: float) -> int:
    """Expires waiting batches without an event since then, and deletes their payloads."""
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


def purge(tx: Transaction, chosen: PurgeBody) -> Purged:
    """Drops the first chosen batches after the cursor. It only goes forward: dropped ones stay, in state expired."""
    after = parse_cursor(chosen.cursor, ListOrder.OLDEST)
    # How far this call looks: the last of the next batches in the state, and how many they are. Reads only the index.
    ahead = f"SELECT seq FROM batches WHERE state = ? AND seq > ? ORDER BY seq LIMIT {LOOKED_AT}"
    last, seen = tx.value(f"SELECT max(seq), count(*) FROM ({ahead}) AS ahead", chosen.state, after)
    rows = _find(tx, chosen, after, last or after)
    ids: list[str] = []
    size = 0
    for seq, id, payload_bytes in rows:
        if ids and size + payload_bytes > BYTES_AT_ONCE:
            break
        batches.discard(tx, seq, State(chosen.state))
        ids.append(id)
        size += payload_bytes
        after = seq
    more = len(ids) < len(rows) or len(rows) == SLICE
    goes_on = after if more else last if seen == LOOKED_AT else None
    return Purged(dropped=ids, bytes=size, next_cursor=None if goes_on is None else f"{goes_on:x}")


def _find(tx: Transaction, chosen: PurgeBody, after: int, last: int) -> list[tuple[int, str, int]]:
    """seq, id and payload bytes of the first chosen batches between the two, at most SLICE."""
    given = {"run = ?": chosen.run, "admitted_at <= ?": chosen.admitted_until}
    given = {condition: value for condition, value in given.items() if value is not None}
    return tx.rows(
        f"SELECT seq, id, payload_bytes FROM batches "
        f"WHERE {' AND '.join(('state = ?', 'seq > ?', 'seq <= ?', 'payload_bytes > 0', *given))} "
        f"ORDER BY seq LIMIT {SLICE} {tx.db.lock}",
        chosen.state,
        after,
        last,
        *given.values(),
    )
