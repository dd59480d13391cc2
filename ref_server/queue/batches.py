"""Batches in SQLite from their admission to their scoring, and what an operator does to them."""

from ref_server.queue import leasing
from ref_server.queue.interface import Admission, Claim, ContentConflict, QueueFull, State, Upload, WrongState
from ref_server.queue.transaction import Transaction

_WAITING = "(state IN ('queued', 'scoring', 'ready') OR state = 'leased' AND NOT started)"


def put(tx: Transaction, upload: Upload) -> Admission:
    known = tx.one("SELECT content_hash, state FROM batches WHERE id = ?", upload.id)
    if known is not None:
        content_hash, state = known
        if content_hash != upload.content_hash:
            raise ContentConflict(f"batch {upload.id} is known with other content")
        return Admission(State(state), created=False)
    _check_room(tx, upload.run, len(upload.body))
    _insert(tx, upload)
    return Admission(State.QUEUED, created=True)


def claim(tx: Transaction, max_tokens: int) -> list[Claim]:
    chosen = _oldest_queued(tx, max_tokens)
    for seq in chosen:
        tx.move(seq, State.SCORING)
    payloads = "SELECT id, body, scoring_attempts FROM batches JOIN payloads USING (seq) WHERE seq = ?"
    return [Claim(*tx.one(payloads, seq)) for seq in chosen]


def complete(tx: Transaction, id: str, body: bytes) -> None:
    seq, _ = _claimed(tx, id)
    tx.execute("UPDATE payloads SET body = ? WHERE seq = ?", body, seq)
    tx.move(seq, State.READY, payload_bytes=len(body), scored=1)


def fail(tx: Transaction, id: str, error: str) -> State:
    seq, attempts = _claimed(tx, id)
    attempts += 1
    if attempts < tx.limits.max_scoring_attempts:
        tx.move(seq, State.QUEUED, error, scoring_attempts=attempts)
        return State.QUEUED
    reason = f"scoring failed {attempts} times; the last: {error}"
    tx.move(seq, State.DEAD, reason, reason=reason, scoring_attempts=attempts)
    return State.DEAD


def requeue(tx: Transaction, id: str) -> State:
    seq, state = _find(tx, id)
    if state not in (State.EXPIRED, State.DEAD):
        raise WrongState(f"batch {id} is {state}: only an expired or a dead batch can be queued again")
    run, scored, payload_bytes = tx.one("SELECT run, scored, payload_bytes FROM batches WHERE seq = ?", seq)
    if payload_bytes == 0:
        raise WrongState(f"batch {id} was dropped: there is nothing left to queue again")
    _check_room(tx, run, payload_bytes)
    state = State.READY if scored else State.QUEUED
    fresh = {"reason": None, "settled_at": None, "scoring_attempts": 0, "deliveries": 0, "returned": 0}
    tx.move(seq, state, "requeued", **fresh)
    return state


def drop(tx: Transaction, id: str) -> None:
    seq, state = _find(tx, id)
    if state == State.SCORING:
        raise WrongState(f"batch {id} is being scored: drop it when that is over")
    if state != State.DONE:
        tx.execute("DELETE FROM payloads WHERE seq = ?", seq)
        leasing.end(tx, seq, State.EXPIRED, "dropped", reason="dropped", payload_bytes=0)


def recover(tx: Transaction) -> None:
    """Queues again what a process that is gone was scoring."""
    for (seq,) in tx.rows("SELECT seq FROM batches WHERE state = 'scoring'"):
        tx.move(seq, State.QUEUED, "the server was restarted")


def forget(tx: Transaction, older_than: float) -> None:
    """Removes every trace of what was settled, and every life of a consumer that was first seen, before that time."""
    tx.execute("DELETE FROM batches WHERE settled_at < ?", older_than)
    tx.execute("DELETE FROM incarnations WHERE seen_at < ?", older_than)


def _check_room(tx: Transaction, run: str, payload_bytes: int) -> None:
    """Raises QueueFull when one more batch of so many bytes would break a limit."""
    limits = tx.limits
    batches, size, of_run = tx.one(
        f"""
        SELECT ifnull(sum(batches), 0), ifnull(sum(payload_bytes), 0), ifnull(sum(batches) FILTER (WHERE run = ?), 0)
        FROM depths WHERE {_WAITING}
        """,
        run,
    )
    if batches >= limits.max_batches:
        raise QueueFull(f"{batches} batches wait and max_batches is {limits.max_batches}")
    if of_run >= limits.max_batches_per_run:
        raise QueueFull(f"{of_run} batches of run {run!r} wait and max_batches_per_run is {limits.max_batches_per_run}")
    if size + payload_bytes > limits.max_bytes:
        raise QueueFull(f"{size} bytes wait, this batch has {payload_bytes} and max_bytes is {limits.max_bytes}")


def _insert(tx: Transaction, upload: Upload) -> None:
    tx.execute(
        """
        INSERT INTO batches (id, content_hash, run, epoch, policy_version, prompt_tokens, completion_tokens,
                             completions, payload_bytes, admitted_at, state)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
        """,
        upload.id,
        upload.content_hash,
        upload.run,
        upload.epoch,
        upload.policy_version,
        upload.prompt_tokens,
        upload.completion_tokens,
        upload.completions,
        len(upload.body),
        tx.at,
        State.QUEUED,
    )
    seq = tx.db.last_insert_rowid()
    tx.execute("INSERT INTO payloads VALUES (?, ?)", seq, upload.body)
    tx.note(seq, State.QUEUED)


def _oldest_queued(tx: Transaction, max_tokens: int) -> list[int]:
    """The longest run of queued batches from the oldest on whose tokens fit, but at least one."""
    queued = "SELECT seq, prompt_tokens + completion_tokens FROM batches WHERE state = 'queued' ORDER BY seq"
    chosen: list[int] = []
    total = 0
    for seq, tokens in tx.db.execute(queued):  # not tx.rows: only the few that fit are to be read
        total += tokens
        if chosen and total > max_tokens:
            break
        chosen.append(seq)
    return chosen


def _claimed(tx: Transaction, id: str) -> tuple[int, int]:
    """seq and failed attempts of a batch that is being scored."""
    seq, state = _find(tx, id)
    if state != State.SCORING:
        raise WrongState(f"batch {id} is {state}, not being scored")
    return seq, tx.one("SELECT scoring_attempts FROM batches WHERE seq = ?", seq)


def _find(tx: Transaction, id: str) -> tuple[int, State]:
    row = tx.one("SELECT seq, state FROM batches WHERE id = ?", id)
    if row is None:
        raise KeyError(id)
    return row[0], State(row[1])
