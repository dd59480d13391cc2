"""SQL operations on leases: who holds which batch, until when, and what happens when a lease ends."""

import hmac
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ref_server.metrics import Count
from ref_server.queue import lineages, payloads
from ref_server.queue.transaction import Transaction, Value
from shared.api import LeaseKey, Outcome, State


class _LeasedRow(NamedTuple):
    seq: int
    state: str
    run: str
    lineage: str
    consumer: str | None
    token: str | None
    released_token: str | None
    started: bool
    deliveries: int


_LEASED_ROW = f"SELECT {', '.join(_LeasedRow._fields)} FROM batches"


def grant_grace(tx: Transaction) -> None:
    """Restarts the time of every lease: its holder could not extend it while the queue was down."""
    tx.execute("UPDATE batches SET expires = ? + lease_seconds WHERE expires IS NOT NULL", tx.now)
    lineages.grant_grace(tx)


def ack(tx: Transaction, keys: Sequence[LeaseKey], checkpoint: str | None) -> list[Outcome]:
    """Batches with recorded training data keep their payloads, up to keep_samples of a run."""
    sampled: set[str] = set()

    def settle(held: _LeasedRow) -> None:
        detail = f"in checkpoint {checkpoint}" if checkpoint else ""
        if payloads.training_bytes(tx, held.seq):
            tx.move(held.seq, State.DONE, detail, expires=None)
            sampled.add(held.run)
        else:
            tx.execute("DELETE FROM payloads WHERE seq = ?", held.seq)
            tx.move(held.seq, State.DONE, detail, payload_bytes=0, expires=None)
        tx.count(Count.ACKED)

    outcomes = _apply_to_leases(tx, keys, settle)
    for run in sorted(sampled):
        payloads.thin_out(tx, run)
    return outcomes


def extend(tx: Transaction, keys: Sequence[LeaseKey], lease_seconds: float, started: bool) -> list[Outcome]:
    def prolong(held: _LeasedRow) -> None:
        tx.execute(
            "UPDATE batches SET lease_seconds = ?, expires = ?, started = (started OR ?) WHERE seq = ?",
            lease_seconds,
            tx.now + lease_seconds,
            started,
            held.seq,
        )

    return _apply_to_leases(tx, keys, prolong)


def release(tx: Transaction, keys: Sequence[LeaseKey], error: str | None) -> list[Outcome]:
    def give_back(held: _LeasedRow) -> None:
        tx.execute("UPDATE batches SET released_token = token, in_doubt = ? WHERE seq = ?", False, held.seq)
        tx.count(Count.RELEASED)
        detail = f"given back by {held.consumer}" + (f": {error}" if error is not None else "")
        _return(tx, held, detail, failed=error is not None)

    return _apply_to_leases(tx, keys, give_back, once_released=Outcome.ALREADY)


def end(tx: Transaction, seq: int, state: State, detail: str, **columns: Value) -> None:
    """Moves a batch to `state` and ends its lease, if it has one."""
    for column in ("token", "consumer", "incarnation", "request_id", "expires"):
        columns[column] = None
    tx.move(seq, state, detail, started=False, **columns)


def lose(tx: Transaction, seq: int, why: str) -> None:
    """Takes a lease away. It counts as a delivery if training on the batch had started.

    In that case the batch is in doubt: a checkpoint may contain its effect while the ack was lost. The trainer that
    leases it next can decide.
    """
    held = _LeasedRow(*tx.value(f"{_LEASED_ROW} WHERE seq = ?", seq))
    if held.started:
        tx.execute("UPDATE batches SET in_doubt = ? WHERE seq = ?", True, seq)
    _return(tx, held, f"lease of {held.consumer} lost: {why}", failed=held.started)


def _apply_to_leases(
    tx: Transaction,
    keys: Sequence[LeaseKey],
    effect: Callable[[_LeasedRow], None],
    once_released: Outcome = Outcome.STALE,
) -> list[Outcome]:
    """Applies `effect` to each batch whose token is still valid. Returns the outcomes in the order of `keys`.

    once_released: the outcome for a token whose lease was released before.
    """
    outcomes: dict[int, Outcome] = {}
    heard: set[tuple[str, str]] = set()
    # Sorted by id: transactions that lock the same batches in the same order cannot deadlock.
    for place, key in sorted(enumerate(keys), key=lambda item: (item[1].id, item[0])):
        outcomes[place], held = _apply_to_key(tx, key, effect, once_released)
        if held and outcomes[place] is Outcome.OK:
            heard.add((held.run, held.lineage))
    for run, lineage in sorted(heard):
        lineages.renew_presence(tx, run, lineage)
    return [outcomes[place] for place in range(len(keys))]


def _apply_to_key(
    tx: Transaction, key: LeaseKey, effect: Callable[[_LeasedRow], None], once_released: Outcome
) -> tuple[Outcome, _LeasedRow | None]:
    row = tx.value(f"{_LEASED_ROW} WHERE id = ? {tx.db.lock}", key.id)
    if row is None:
        return Outcome.UNKNOWN, None
    held = _LeasedRow(*row)
    if _token_matches(held.token, key.token):
        if held.state == State.DONE:
            return Outcome.ALREADY, held
        effect(held)
        return Outcome.OK, held
    return once_released if _token_matches(held.released_token, key.token) else Outcome.STALE, held


def _token_matches(known: str | None, shown: str) -> bool:
    return known is not None and hmac.compare_digest(known.encode(), shown.encode())


def _return(tx: Transaction, held: _LeasedRow, detail: str, *, failed: bool) -> None:
    """Makes a leased batch ready again. A failed one may have crashed its consumer: after max_deliveries it is dead."""
    payloads.forget_training(tx, held.seq)
    deliveries = held.deliveries + failed
    if failed and deliveries >= tx.limits.max_deliveries:
        reason = f"{deliveries} failed deliveries; the last: {detail}" if deliveries > 1 else detail
        end(tx, held.seq, State.DEAD, reason, reason=reason, deliveries=deliveries)
        tx.count(Count.DEAD_TRAINING)
        return
    end(tx, held.seq, State.READY, detail, deliveries=deliveries, returned=True)
    tx.shorten_history(held.seq)
    lineages.expire_if_useless(tx, held.seq)
