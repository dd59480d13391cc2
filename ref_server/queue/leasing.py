"""SQL operations on leases: who holds which batch, until when, and what happens when a lease ends."""

import hmac
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ref_server.metrics.activity import Count
from ref_server.queue import lineages, ready
from ref_server.queue.errors import Superseded, TooManyInFlight
from ref_server.queue.freshness import expire_useless
from ref_server.queue.records import LARGE_BYTES, Lease, Wanted
from ref_server.queue.share import Share
from ref_server.queue.transaction import Transaction, Value
from shared.api import Key, LeaseBody, Order, Outcome, State

# In every order, batches that came back from a lease come first.
ORDERS = {
    Order.FIFO: "returned DESC, seq",
    Order.FRESHEST: "returned DESC, policy_version DESC, seq DESC",
}

# That an incarnation lives is written down at most this often.
_SEEN_SECONDS = 60.0


class _Held(NamedTuple):
    seq: int
    state: str
    run: str
    lineage: str
    consumer: str | None
    token: str | None
    released_token: str | None
    started: bool
    deliveries: int


_HELD = f"SELECT {', '.join(_Held._fields)} FROM batches"
_BODY = f"CASE WHEN payload_bytes <= {LARGE_BYTES} THEN body END"
_LEASE = (
    f"SELECT id, token, lease_seconds, deliveries + 1, payload_bytes, {_BODY} FROM batches JOIN payloads USING (seq)"
)


def grant_grace(tx: Transaction) -> None:
    """Restarts the time of every lease: its holder could not extend it while the queue was down."""
    tx.execute("UPDATE batches SET expires = ? + lease_seconds WHERE expires IS NOT NULL", tx.now)
    lineages.grant_grace(tx)


def lease(tx: Transaction, request: LeaseBody) -> Lease | None:
    tx.db.serialise(f"consumer {request.consumer}")  # the same request may arrive twice at once
    lineages.enter(tx, request)
    _supersede_older(tx, request)
    lineages.abandon_others(tx, request)  # also what the leases that ended just now gave back
    expire_useless(tx, request)
    leased = _lease(tx, request)
    lineages.hear(tx, request.run, request.own_lineage)
    return leased


def _lease(tx: Transaction, request: LeaseBody) -> Lease | None:
    if repeated := _repeated(tx, request):
        return repeated
    _check_in_flight(tx, request.run)
    seq = _first_ready(tx, request)
    if seq is None:
        return None
    if request.run is None:  # which run it counts for is only known now
        _check_in_flight(tx, tx.one("SELECT run FROM batches WHERE seq = ?", seq))
    _grant(tx, seq, request)
    tx.count(Count.LEASED)
    if tx.one("SELECT returned FROM batches WHERE seq = ?", seq):
        tx.count(Count.REDELIVERED)
    return Lease(*tx.one(f"{_LEASE} WHERE seq = ?", seq))


def ack(tx: Transaction, keys: Sequence[Key], checkpoint: str | None) -> list[Outcome]:
    def settle(held: _Held) -> None:
        tx.execute("DELETE FROM payloads WHERE seq = ?", held.seq)
        detail = f"in checkpoint {checkpoint}" if checkpoint else ""
        tx.move(held.seq, State.DONE, detail, payload_bytes=0, expires=None)
        tx.count(Count.ACKED)

    return _apply_to_leases(tx, keys, settle)


def extend(tx: Transaction, keys: Sequence[Key], lease_seconds: float, started: bool) -> list[Outcome]:
    def prolong(held: _Held) -> None:
        tx.execute(
            "UPDATE batches SET lease_seconds = ?, expires = ?, started = (started OR ?) WHERE seq = ?",
            lease_seconds,
            tx.now + lease_seconds,
            started,
            held.seq,
        )

    return _apply_to_leases(tx, keys, prolong)


def release(tx: Transaction, keys: Sequence[Key], error: str | None) -> list[Outcome]:
    def give_back(held: _Held) -> None:
        tx.execute("UPDATE batches SET released_token = token, in_doubt = ? WHERE seq = ?", False, held.seq)
        tx.count(Count.RELEASED)
        detail = f"given back by {held.consumer}"
        if error is None:
            _return_to_ready(tx, held, detail, held.deliveries)
        else:
            _count_failed_delivery(tx, held, f"{detail}: {error}")

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
    held = _Held(*tx.one(f"{_HELD} WHERE seq = ?", seq))
    detail = f"lease of {held.consumer} lost: {why}"
    if held.started:
        tx.execute("UPDATE batches SET in_doubt = ? WHERE seq = ?", True, seq)
        _count_failed_delivery(tx, held, detail)
    else:
        _return_to_ready(tx, held, detail, held.deliveries)


def _supersede_older(tx: Transaction, request: LeaseBody) -> None:
    """Ends the leases of a consumer's earlier incarnations at the first request of a new one.

    Raises Superseded for an incarnation that is no longer the newest.
    """
    consumer, incarnation = request.consumer, request.incarnation
    if incarnation is None:
        return
    newest = "SELECT incarnation, seen_at FROM incarnations WHERE consumer = ? ORDER BY number DESC LIMIT 1"
    known, seen_at = tx.one(newest, consumer) or (None, 0.0)
    if known == incarnation:
        if seen_at <= tx.at - _SEEN_SECONDS:
            seen = "UPDATE incarnations SET seen_at = ? WHERE consumer = ? AND incarnation = ?"
            tx.execute(seen, tx.at, consumer, incarnation)
        return
    known = "SELECT 1 FROM incarnations WHERE consumer = ? AND incarnation = ?"
    if tx.one(known, consumer, incarnation):
        raise Superseded(f"a newer incarnation of consumer {consumer!r} has taken over from {incarnation!r}")
    tx.execute(
        "INSERT INTO incarnations (consumer, incarnation, seen_at) VALUES (?, ?, ?)", consumer, incarnation, tx.at
    )
    old = "SELECT seq FROM batches WHERE state = 'leased' AND consumer = ? AND incarnation IS DISTINCT FROM ?"
    for (seq,) in tx.rows(f"{old} ORDER BY seq {tx.db.lock}", consumer, incarnation):
        lose(tx, seq, "a new incarnation of the consumer took over")
        tx.count(Count.LEASE_SUPERSEDED)


def _repeated(tx: Transaction, request: LeaseBody) -> Lease | None:
    """The lease that the same request_id was given before: its response may have been lost. None if there is none.

    One statement reads all of it: between two, the lease may end, and the batch be leased to somebody else.
    """
    if request.request_id is None:
        return None
    repeated = f"{_LEASE} WHERE state = 'leased' AND consumer = ? AND request_id = ?"
    row = tx.one(repeated, request.consumer, request.request_id)
    return Lease(*row) if row else None


def _check_in_flight(tx: Transaction, run: str | None) -> None:
    """Raises TooManyInFlight when the leased, unsettled batches reach a limit, or the run's share of it."""
    leased, of_run = tx.one(
        """
        SELECT CAST(coalesce(sum(batches), 0) AS BIGINT),
               CAST(coalesce(sum(batches) FILTER (WHERE run = ?), 0) AS BIGINT)
        FROM depths WHERE state = 'leased'
        """,
        run,
    )
    limits = tx.limits
    if run is None:
        if leased >= limits.max_in_flight:
            most = limits.max_in_flight
            raise TooManyInFlight(f"{leased} batches are leased and not settled; max_in_flight is {most}")
        return
    share = Share(run, of_run, leased, "batches", "are leased and not settled")
    if why := share.refusal(1, limits.max_in_flight, "max_in_flight", limits.max_in_flight_per_run):
        raise TooManyInFlight(why)


def _first_ready(tx: Transaction, request: LeaseBody) -> int | None:
    """seq of the first ready batch in the request's order. Each order has an index, so depth does not matter."""
    where, values = ready.condition(Wanted.by(request))
    order = f"ORDER BY {ORDERS[request.order]} LIMIT 1"
    return tx.one(f"SELECT seq FROM batches WHERE {where} {order} {tx.db.skip_locked}", *values)


def _grant(tx: Transaction, seq: int, request: LeaseBody) -> None:
    tx.move(
        seq,
        State.LEASED,
        f"to {request.consumer}",
        token=secrets.token_urlsafe(24),
        consumer=request.consumer,
        incarnation=request.incarnation,
        request_id=request.request_id,
        lease_seconds=request.lease_seconds,
        expires=tx.now + request.lease_seconds,
    )


def _apply_to_leases(
    tx: Transaction,
    keys: Sequence[Key],
    effect: Callable[[_Held], None],
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
        lineages.hear(tx, run, lineage)
    return [outcomes[place] for place in range(len(keys))]


def _apply_to_key(
    tx: Transaction, key: Key, effect: Callable[[_Held], None], once_released: Outcome
) -> tuple[Outcome, _Held | None]:
    row = tx.one(f"{_HELD} WHERE id = ? {tx.db.lock}", key.id)
    if row is None:
        return Outcome.UNKNOWN, None
    held = _Held(*row)
    if _token_matches(held.token, key.token):
        if held.state == State.DONE:
            return Outcome.ALREADY, held
        effect(held)
        return Outcome.OK, held
    return once_released if _token_matches(held.released_token, key.token) else Outcome.STALE, held


def _token_matches(known: str | None, shown: str) -> bool:
    return known is not None and hmac.compare_digest(known.encode(), shown.encode())


def _count_failed_delivery(tx: Transaction, held: _Held, detail: str) -> None:
    """Takes back a batch that may have crashed its consumer. After max_deliveries such returns it is dead."""
    deliveries = held.deliveries + 1
    if deliveries < tx.limits.max_deliveries:
        _return_to_ready(tx, held, detail, deliveries)
    else:
        reason = f"{deliveries} failed deliveries; the last: {detail}" if deliveries > 1 else detail
        end(tx, held.seq, State.DEAD, reason, reason=reason, deliveries=deliveries)
        tx.count(Count.DEAD_TRAINING)


def _return_to_ready(tx: Transaction, held: _Held, detail: str, deliveries: int) -> None:
    end(tx, held.seq, State.READY, detail, deliveries=deliveries, returned=True)
    tx.shorten_history(held.seq)
    lineages.expire_if_useless(tx, held.seq)
