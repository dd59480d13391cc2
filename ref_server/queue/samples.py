"""SQL operations on kept samples: batches that training told of, which stay whole after their ack, to be looked at.

What training made of a batch (`shared/training.py`) lies beside its payload and goes with it. A run keeps those of its
samples whose content hashes are the smallest: hashes know nothing of time, so what stays is a uniform sample of the
whole run.
"""

from ref_server.queue import stored
from ref_server.queue.errors import WrongState
from ref_server.queue.indexes import SAMPLE
from ref_server.queue.transaction import Transaction
from shared.api import State


def put_training(tx: Transaction, id: str, training: bytes) -> None:
    """Of a leased batch, or again of a kept one. Raises KeyError, WrongState, QueueFull, StorageFull."""
    row = tx.one(f"SELECT seq, state, payload_bytes FROM batches WHERE id = ? {tx.db.lock}", id)
    if row is None:
        raise KeyError(id)
    seq, state, payload_bytes = row
    if state not in (State.LEASED, State.DONE):
        raise WrongState(f"batch {id} is {state}: training is told of while a batch is leased")
    if payload_bytes == 0:
        raise WrongState(f"batch {id} is {state} and its payload is gone: there is nothing to look at")
    tx.db.check_disk(len(training))
    growth = len(training) - _size(tx, seq)
    if not stored.make_room(tx, growth):
        raise stored.MoreToDrop(id)
    if not tx.rows("UPDATE payloads SET training = ? WHERE seq = ? RETURNING seq", training, seq):
        raise WrongState(f"batch {id} is {state} and its payload would have to make room: there is none")
    tx.execute("UPDATE batches SET payload_bytes = payload_bytes + ? WHERE seq = ?", growth, seq)


def find_training(tx: Transaction, id: str) -> bytes | None:
    return tx.one("SELECT training FROM payloads JOIN batches USING (seq) WHERE id = ?", id)


def is_told_of(tx: Transaction, seq: int) -> bool:
    """Whether training told of the batch."""
    return _size(tx, seq) > 0


def forget_training(tx: Transaction, seq: int) -> None:
    """To be called when a lease ends without an ack: another training step will tell of the batch."""
    if size := _size(tx, seq):
        tx.execute("UPDATE payloads SET training = NULL WHERE seq = ?", seq)
        tx.execute("UPDATE batches SET payload_bytes = payload_bytes - ? WHERE seq = ?", size, seq)


def thin_out(tx: Transaction, run: str) -> None:
    """Drops payloads of kept samples of a run beyond the bound, those with the largest hashes."""
    most = tx.limits.keep_samples
    kept = tx.one(f"SELECT count(*) FROM batches WHERE run = ? AND {SAMPLE}", run)
    if kept <= most:
        return
    largest = f"SELECT seq FROM batches WHERE run = ? AND {SAMPLE} ORDER BY content_hash DESC, seq DESC LIMIT ?"
    for (seq,) in tx.rows(f"{largest} {tx.db.skip_locked}", run, min(kept - most, stored.PAYLOADS_AT_ONCE)):
        stored.drop_payload(tx, seq, State.DONE, f"its payload was dropped: the run keeps {most} samples")


def _size(tx: Transaction, seq: int) -> int:
    """Bytes of what training told of a batch; 0 for nothing."""
    return tx.one("SELECT coalesce(length(training), 0) FROM payloads WHERE seq = ?", seq) or 0
