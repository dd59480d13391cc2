"""Stored payloads: the room for them, and the samples that stay after their ack.

When newer payloads need room, those of settled batches are deleted, the longest settled first. Batches with recorded
training data (`shared.batch.Training`) stay whole after their ack, for people to inspect: kept samples. Training data
lies next to the payload, as scores do, and is deleted with it. A run keeps the samples with the smallest content
hashes: hashes do not depend on time, so what stays is a uniform sample of the whole run.
"""

from ref_server.metrics import Count
from ref_server.queue.errors import QueueFull, WrongState
from ref_server.queue.schema import KEPT, SAMPLE
from ref_server.queue.transaction import Transaction
from shared.api import State

# What one transaction drops at most: others wait for it.
PAYLOADS_AT_ONCE = 64
BYTES_AT_ONCE = 64 * 2**20


class MoreToDrop(Exception):
    """A transaction may not drop enough payloads to make room: drop some in others first."""


def make_room(tx: Transaction, size: int) -> bool:
    """Drops payloads of settled batches until `size` more bytes may be stored. False if one transaction is not enough.

    The batches stay known, with their reasons. Raises QueueFull if none of them has a payload left.
    """
    stored = tx.value("SELECT CAST(coalesce(sum(payload_bytes), 0) AS BIGINT) FROM depths")
    excess = stored + size - tx.limits.max_stored_bytes
    if excess <= 0:
        return True
    dropped = drop_oldest(tx, min(excess, BYTES_AT_ONCE))
    if dropped == 0:
        most = tx.limits.max_stored_bytes
        raise QueueFull(f"{stored} bytes are stored, all in use; this is {size} more and max_stored_bytes is {most}")
    return dropped >= excess


def any_to_drop(tx: Transaction) -> bool:
    return tx.value(f"SELECT 1 FROM batches WHERE {KEPT} ORDER BY settled_at, seq LIMIT 1") is not None


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


def put_training(tx: Transaction, id: str, training: bytes) -> None:
    """Of a leased batch, or again of a kept one. Raises KeyError, WrongState, QueueFull, StorageFull."""
    seq, state, payload_bytes = tx.find(id, "seq, state, payload_bytes")
    if state not in (State.LEASED, State.DONE):
        raise WrongState(f"batch {id} is {state}: training data is stored while a batch is leased")
    if payload_bytes == 0:
        raise WrongState(f"batch {id} is {state} and its payload is gone: there is nothing to inspect")
    tx.db.check_disk(len(training))
    growth = len(training) - training_bytes(tx, seq)
    if not make_room(tx, growth):
        raise MoreToDrop(id)
    stored = """
        INSERT INTO training (seq, body) SELECT seq, ? FROM payloads WHERE seq = ?
        ON CONFLICT (seq) DO UPDATE SET body = excluded.body RETURNING seq
    """
    if not tx.rows(stored, training, seq):
        raise WrongState(f"batch {id} is {state} and its payload would have to be deleted to make room")
    tx.execute("UPDATE batches SET payload_bytes = payload_bytes + ? WHERE seq = ?", growth, seq)


def find_training(tx: Transaction, id: str) -> bytes | None:
    return tx.value("SELECT body FROM training JOIN batches USING (seq) WHERE id = ?", id)


def forget_training(tx: Transaction, seq: int) -> None:
    """To be called when a lease ends without an ack: another training step will record the batch."""
    if size := training_bytes(tx, seq):
        tx.execute("DELETE FROM training WHERE seq = ?", seq)
        tx.execute("UPDATE batches SET payload_bytes = payload_bytes - ? WHERE seq = ?", size, seq)


def thin_out(tx: Transaction, run: str) -> None:
    """Drops payloads of kept samples of a run beyond the bound, those with the largest hashes."""
    most = tx.limits.keep_samples
    kept = tx.value(f"SELECT count(*) FROM batches WHERE run = ? AND {SAMPLE}", run)
    if kept <= most:
        return
    largest = f"SELECT seq FROM batches WHERE run = ? AND {SAMPLE} ORDER BY content_hash DESC, seq DESC LIMIT ?"
    for (seq,) in tx.rows(f"{largest} {tx.db.skip_locked}", run, min(kept - most, PAYLOADS_AT_ONCE)):
        drop_payload(tx, seq, State.DONE, f"its payload was dropped: the run keeps {most} samples")


def training_bytes(tx: Transaction, seq: int) -> int:
    """0 if the batch has no training data."""
    return tx.value("SELECT length(body) FROM training WHERE seq = ?", seq) or 0
