"""The room for stored payloads: those of settled batches go when newer ones need it, the longest settled first."""

from ref_server.metrics.activity import Count
from ref_server.queue.errors import NoRoom, QueueFull
from ref_server.queue.indexes import KEPT
from ref_server.queue.share import Share
from ref_server.queue.transaction import Transaction
from shared.api import State

# What one transaction drops at most: others wait for it.
PAYLOADS_AT_ONCE = 64
BYTES_AT_ONCE = 64 * 2**20


class MoreToDrop(Exception):
    """A transaction may not drop enough payloads to make room: drop some in others first."""


def check_share(tx: Transaction, run: str, uploader: str, size: int) -> None:
    """Raises QueueFull if `size` more bytes exceed the share that the run or its uploader may have of the bytes of
    unsettled batches.
    """
    unsettled, of_run, of_uploader = tx.one(
        """
        SELECT CAST(coalesce(sum(payload_bytes), 0) AS BIGINT),
               CAST(coalesce(sum(payload_bytes) FILTER (WHERE run = ?), 0) AS BIGINT),
               CAST(coalesce(sum(payload_bytes) FILTER (WHERE uploader = ? AND uploader <> ''), 0) AS BIGINT)
        FROM depths WHERE state IN ('queued', 'scoring', 'ready', 'leased')
        """,
        run,
        uploader,
    )
    most = tx.limits.max_stored_bytes
    share = Share(run, of_run, of_uploader, unsettled, "bytes", "wait or are leased")
    if why := share.refusal(size, most, "max_stored_bytes", most):
        # A large batch found no room: smaller ones may.
        raise NoRoom(why, run) if size <= most // 100 else QueueFull(why)


def make_room(tx: Transaction, size: int) -> bool:
    """Drops payloads of settled batches until `size` more bytes may be stored. False if one transaction is not enough.

    The batches stay known, with their reasons. Raises QueueFull if none of them has a payload left.
    """
    stored = tx.one("SELECT CAST(coalesce(sum(payload_bytes), 0) AS BIGINT) FROM depths")
    excess = stored + size - tx.limits.max_stored_bytes
    if excess <= 0:
        return True
    dropped = drop_oldest(tx, min(excess, BYTES_AT_ONCE))
    if dropped == 0:
        most = tx.limits.max_stored_bytes
        raise QueueFull(f"{stored} bytes are stored, all in use; this is {size} more and max_stored_bytes is {most}")
    return dropped >= excess


def any_to_drop(tx: Transaction) -> bool:
    return tx.one(f"SELECT 1 FROM batches WHERE {KEPT} ORDER BY settled_at, seq LIMIT 1") is not None


def drop_oldest(tx: Transaction, size: int) -> int:
    """Drops the payloads that were settled first, `size` bytes at least if there are so many. Returns how many."""
    oldest = f"""
        SELECT seq, state, payload_bytes FROM batches WHERE {KEPT}
        ORDER BY settled_at, seq LIMIT {PAYLOADS_AT_ONCE} {tx.db.skip_locked}
    """
    dropped = 0
    for seq, state, payload_bytes in tx.rows(oldest):
        if dropped >= size:
            break
        drop_payload(tx, seq, state, "its payload was dropped to make room")
        tx.count(Count.PAYLOAD_DROPPED)
        dropped += payload_bytes
    return dropped


def drop_payload(tx: Transaction, seq: int, state: State, why: str) -> None:
    """Deletes the payload of a settled batch, which stays in its state."""
    tx.execute("DELETE FROM payloads WHERE seq = ?", seq)
    tx.execute("UPDATE batches SET payload_bytes = 0 WHERE seq = ?", seq)
    tx.note([seq], state, why)
