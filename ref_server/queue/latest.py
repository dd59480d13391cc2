"""SQL operations for runs without leases: deliver the freshest batch; when the queue is full, displace the oldest."""

from ref_server.metrics.activity import Count
from ref_server.queue import batches, ready
from ref_server.queue.errors import QueueFull
from ref_server.queue.indexes import WAITING
from ref_server.queue.records import Upload
from ref_server.queue.transaction import Transaction
from shared.api import Order, State


def any_ready(tx: Transaction, run: str) -> bool:
    return tx.one("SELECT 1 FROM batches WHERE state = 'ready' AND run = ? AND lineage = '' LIMIT 1", run) is not None


def take(tx: Transaction, run: str) -> bytes | None:
    seq = tx.one(
        f"SELECT seq FROM batches WHERE state = 'ready' AND run = ? AND lineage = '' "
        f"ORDER BY {ready.ORDERS[Order.FRESHEST]} LIMIT 1 {tx.db.skip_locked}",
        run,
    )
    if seq is None:
        return None
    body = tx.one("SELECT body FROM payloads WHERE seq = ?", seq)
    tx.execute("DELETE FROM payloads WHERE seq = ?", seq)
    tx.move(seq, State.DONE, "delivered", payload_bytes=0)
    tx.count(Count.DELIVERED)
    return body


def put_displacing(tx: Transaction, upload: Upload) -> list[str]:
    displaced = []
    while True:
        try:
            batches.put(tx, upload)
            return displaced
        except QueueFull:
            oldest = _oldest_waiting(tx, upload.run)
            if oldest is None:
                raise  # the transaction rolls back, so nothing is displaced
            seq, id = oldest
            batches.expire(tx, seq, "displaced")
            tx.count(Count.EXPIRED_DISPLACED)
            displaced.append(id)


def _oldest_waiting(tx: Transaction, run: str) -> tuple[int, str] | None:
    """seq and id of the oldest batch of a run that is neither leased nor being scored."""
    return tx.one(
        f"SELECT seq, id FROM batches WHERE run = ? AND {WAITING} ORDER BY seq LIMIT 1 {tx.db.skip_locked}",
        run,
    )
