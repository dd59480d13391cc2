"""SQL operations on batches: admission, scoring, expiry, delivery without leases, an operator's requeue and drop."""

from contextlib import suppress
from typing import Any

from ref_server.metrics import Count
from ref_server.queue import leases, limits, lineages, payloads
from ref_server.queue.errors import ContentConflict, QueueFull, WrongState
from ref_server.queue.records import Claim, Payload, Upload, WantedReference
from ref_server.queue.schema import ORDERS, WAITING
from ref_server.queue.transaction import Transaction
from shared.api import Order, State, Uploaded

# One claim takes at most this many queued batches: a forward of more would consist of tiny batches.
_MAX_CLAIMS = 64


def put(tx: Transaction, upload: Upload) -> Uploaded:
    tx.db.serialise("admission")  # so that limits hold exactly and each id is admitted once
    known = tx.value("SELECT content_hash, state FROM batches WHERE id = ?", upload.id)
    if known is not None:
        content_hash, state = known
        if content_hash != upload.content_hash:
            raise ContentConflict(f"batch {upload.id} is known with other content")
        tx.count(Count.DUPLICATE)
        return Uploaded(id=upload.id, state=State(state), created=False)
    tx.db.check_disk(len(upload.body))
    useless = lineages.useless(tx, upload.run, upload.lineage)
    if not useless:
        lineages.check_epoch(tx, upload.run, upload.lineage, upload.epoch)
        limits.check_waiting(tx, upload.run, upload.uploader, len(upload.body))
        if not payloads.make_room(tx, len(upload.body)):
            raise payloads.MoreToDrop(upload.id)
    state = State.QUEUED if upload.to_score else State.READY
    seq = _insert(tx, upload, state)
    tx.count(Count.ADMITTED)
    if useless:
        expire(tx, seq, lineages.REASONS[useless])  # without its payload: no limit bounds how many of them come
        tx.count(useless)
        state = State.EXPIRED
    return Uploaded(id=upload.id, state=state, created=True)


def claim(tx: Transaction, max_tokens: int, reference_version: int) -> list[Claim]:
    wanted = wanted_reference(tx)
    if wanted is not None and wanted.version != reference_version:
        return []
    claimed = """
        SELECT id, run, body, scoring_attempts, interruptions FROM batches JOIN payloads USING (seq) WHERE seq = ?
    """
    claims: list[Claim] = []
    while not claims and (chosen := _oldest_queued(tx, max_tokens)):
        for seq in chosen:
            if row := tx.value(claimed, seq):
                tx.move(seq, State.SCORING, scorer=tx.scorer, expires=tx.claim_expires)
                claims.append(Claim(*row))
            else:  # the store is damaged: this batch must not keep the others from being scored
                expire(tx, seq, "its payload is missing in the store")
    return claims


def complete(tx: Transaction, id: str, scores: bytes) -> None:
    seq, _, admitted_at, payload_bytes = _claimed(tx, id)
    with suppress(QueueFull):  # what was scored is kept, even beyond the limit
        payloads.make_room(tx, len(scores))
    tx.execute("INSERT INTO scores (seq, body) VALUES (?, ?)", seq, scores)
    tx.move(seq, State.READY, payload_bytes=payload_bytes + len(scores), scored=True, scorer=None, expires=None)
    tx.ready_after.append(max(0.0, tx.at - admitted_at))
    lineages.expire_if_useless(tx, seq)


def fail(tx: Transaction, id: str, error: str) -> State:
    seq, failed, *_ = _claimed(tx, id)
    attempts = failed + 1
    ended = {"scoring_attempts": attempts, "scorer": None, "expires": None}
    if attempts < tx.limits.max_scoring_attempts:
        tx.move(seq, State.QUEUED, error, **ended)
        return State.QUEUED
    reason = f"scoring failed {attempts} times; the last: {error}"
    tx.move(seq, State.DEAD, reason, reason=reason, **ended)
    tx.count(Count.DEAD_SCORING)
    return State.DEAD


def want_reference(tx: Transaction, wanted: WantedReference) -> WantedReference:
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
    return wanted_reference(tx) or wanted


def wanted_reference(tx: Transaction) -> WantedReference | None:
    row = tx.value("SELECT snapshot, version, base FROM reference")
    return None if row is None else WantedReference(*row)


def any_ready(tx: Transaction, run: str) -> bool:
    return tx.value("SELECT 1 FROM batches WHERE state = 'ready' AND run = ? AND lineage = '' LIMIT 1", run) is not None


def take(tx: Transaction, run: str) -> Payload | None:
    seq = tx.value(
        f"SELECT seq FROM batches WHERE state = 'ready' AND run = ? AND lineage = '' "
        f"ORDER BY {ORDERS[Order.FRESHEST]} LIMIT 1 {tx.db.skip_locked}",
        run,
    )
    if seq is None:
        return None
    row = tx.value(
        "SELECT payloads.body, scores.body FROM payloads LEFT JOIN scores USING (seq) WHERE payloads.seq = ?", seq
    )
    tx.execute("DELETE FROM payloads WHERE seq = ?", seq)
    tx.move(seq, State.DONE, "delivered", payload_bytes=0)
    tx.count(Count.DELIVERED)
    return row and Payload(*row)


def put_displacing(tx: Transaction, upload: Upload) -> list[str]:
    displaced = []
    while True:
        try:
            put(tx, upload)
            return displaced
        except QueueFull:
            oldest = tx.value(
                f"SELECT seq, id FROM batches WHERE run = ? AND {WAITING} ORDER BY seq LIMIT 1 {tx.db.skip_locked}",
                upload.run,
            )
            if oldest is None:
                raise  # the transaction rolls back, so nothing is displaced
            seq, id = oldest
            expire(tx, seq, "displaced")
            tx.count(Count.EXPIRED_DISPLACED)
            displaced.append(id)


def requeue(tx: Transaction, id: str) -> State:
    tx.db.serialise("admission")
    seq, state, run, scored, payload_bytes = tx.find(id, "seq, state, run, scored, payload_bytes")
    if state not in (State.EXPIRED, State.DEAD):
        raise WrongState(f"batch {id} is {state}: only an expired or a dead batch can be queued again")
    if payload_bytes == 0:
        raise WrongState(f"batch {id} was dropped: there is nothing left to queue again")
    limits.check_waiting(tx, run, "", payload_bytes)  # an operator requested it, so it counts for no token
    state = State.READY if scored else State.QUEUED
    fresh = {"reason": None, "settled_at": None, "scoring_attempts": 0, "interruptions": 0, "deliveries": 0}
    tx.move(seq, state, "requeued", returned=False, in_doubt=False, **fresh)
    tx.shorten_history(seq)
    tx.count(Count.REQUEUED)
    return state


def drop(tx: Transaction, id: str) -> None:
    seq, state, payload_bytes = tx.find(id, "seq, state, payload_bytes")
    if state == State.SCORING:
        raise WrongState(f"batch {id} is being scored: drop it when that is over")
    if state != State.DONE:
        discard(tx, seq, state)
    elif payload_bytes:
        payloads.drop_payload(tx, seq, state, "its payload was dropped")


def discard(tx: Transaction, seq: int, state: State) -> None:
    """Expires a batch that an operator drops. state: its present one, and not that of one being scored or done."""
    expire(tx, seq, "dropped")
    if state != State.EXPIRED:
        tx.count(Count.EXPIRED_DROPPED)


def expire(tx: Transaction, seq: int, reason: str) -> None:
    """Expires a batch for good: deletes its payload and ends its lease, if it has one."""
    tx.execute("DELETE FROM payloads WHERE seq = ?", seq)
    leases.end(tx, seq, State.EXPIRED, reason, reason=reason, payload_bytes=0)


def sweep(tx: Transaction) -> None:
    """Takes back every claim and every lease that has expired."""
    over = tx.rows(f"SELECT seq, state FROM batches WHERE expires <= ? {tx.db.skip_locked}", tx.now)
    for seq, state in over:
        if state == State.SCORING:
            interrupt(tx, seq)
        else:
            leases.lose(tx, seq, "it was not extended in time")
            tx.count(Count.LEASE_EXPIRED)


def recover(tx: Transaction) -> None:
    """Takes back the claims of a process that has ended."""
    for (seq,) in tx.rows("SELECT seq FROM batches WHERE state = 'scoring' ORDER BY seq"):
        interrupt(tx, seq)


def interrupt(tx: Transaction, seq: int) -> None:
    """Queues a batch again after its server ended while scoring it.

    After max_deliveries such interruptions the batch is dead: it is probably what ends the servers.
    """
    count = 1 + tx.value("SELECT interruptions FROM batches WHERE seq = ?", seq)
    detail = "the server ended while scoring it"
    ended = {"interruptions": count, "scorer": None, "expires": None}
    if count < tx.limits.max_deliveries:
        tx.move(seq, State.QUEUED, detail, **ended)
    else:
        reason = f"{detail}, {count} times"
        tx.move(seq, State.DEAD, reason, reason=reason, **ended)
        tx.count(Count.DEAD_INTERRUPTED)


def _insert(tx: Transaction, upload: Upload, state: State) -> int:
    seq = tx.value(
        """
        INSERT INTO batches (id, content_hash, run, lineage, uploader, epoch, policy_version, prompt_tokens,
                             completion_tokens, completions, payload_bytes, admitted_at, state, scored)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING seq
        """,
        upload.id,
        upload.content_hash,
        upload.run,
        upload.lineage,
        upload.uploader,
        upload.epoch,
        upload.policy_version,
        upload.prompt_tokens,
        upload.completion_tokens,
        upload.completions,
        len(upload.body),
        tx.at,
        state,
        not upload.to_score,
    )
    tx.execute("INSERT INTO payloads (seq, body) VALUES (?, ?)", seq, upload.body)
    tx.note([seq], state)
    return seq


def _oldest_queued(tx: Transaction, max_tokens: int) -> list[int]:
    """seq of queued batches, oldest first, as many as fit max_tokens, but at least one.

    A batch that was interrupted before is claimed by itself: if it ends its server again, no other batch is affected.
    """
    queued = f"""
        SELECT seq, prompt_tokens + completion_tokens, interruptions FROM batches
        WHERE state = 'queued' ORDER BY seq LIMIT {_MAX_CLAIMS} {tx.db.skip_locked}
    """
    chosen: list[int] = []
    total = 0
    for seq, tokens, interruptions in tx.rows(queued):
        total += tokens
        if chosen and (total > max_tokens or interruptions):
            break
        chosen.append(seq)
        if interruptions:
            break
    return chosen


def _claimed(tx: Transaction, id: str) -> list[Any]:
    """seq, failed attempts, admission time and payload bytes of a batch that this scorer has claimed.

    Raises KeyError, WrongState.
    """
    state, scorer, *claimed = tx.find(id, "state, scorer, seq, scoring_attempts, admitted_at, payload_bytes")
    if state != State.SCORING or scorer != tx.scorer:
        raise WrongState(f"batch {id} is {state}, not being scored" + (" here" if state == State.SCORING else ""))
    return claimed
