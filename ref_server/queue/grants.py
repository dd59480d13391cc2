"""SQL operations that grant leases: which batches a request gets, how many it could get, which leases it ends."""

import secrets
from collections.abc import Collection, Mapping

from ref_server.metrics import Count
from ref_server.queue import leases, lineages
from ref_server.queue.errors import Superseded, TooManyInFlight
from ref_server.queue.limits import InFlight
from ref_server.queue.records import LARGE_BYTES, MAX_LEASE_BYTES, Wanted
from ref_server.queue.schema import ORDERS
from ref_server.queue.transaction import Transaction, Value, several
from shared.api import LEGACY_RUN, Lease, LeaseBody, State

# The last sign of life of an incarnation is stored at most this often.
_SEEN_SECONDS = 60.0


# Payloads are read as far as they are LARGE_BYTES together: `held` has the sums, and never the payloads.
_LEASES = """
    WITH held AS (
        SELECT seq, id, token, lease_seconds, deliveries + 1 AS deliveries, payload_bytes,
               sum(payload_bytes) OVER (ORDER BY {order}) AS up_to_here
        FROM batches WHERE {condition} ORDER BY {order} LIMIT ?
    )
    SELECT id, token, lease_seconds, deliveries, payload_bytes, payloads.body, scores.body
    FROM held LEFT JOIN payloads ON payloads.seq = held.seq AND up_to_here <= ?
              LEFT JOIN scores ON scores.seq = payloads.seq ORDER BY up_to_here
"""


def lease(tx: Transaction, request: LeaseBody) -> list[Lease]:
    tx.db.serialise(f"consumer {request.consumer}")  # the same request may arrive twice at once
    lineages.enter(tx, request)
    _supersede_older(tx, request)
    lineages.abandon_others(tx, request)  # also what the leases that ended just now gave back
    lineages.expire_useless(tx, request)
    granted = _repeated(tx, request) or _grant(tx, _choose(tx, request), request)
    lineages.renew_presence(tx, request.run, request.lineage_name)
    return granted


def _supersede_older(tx: Transaction, request: LeaseBody) -> None:
    """Ends the leases of a consumer's earlier incarnations at the first request of a new one.

    Raises Superseded for an incarnation that is no longer the newest.
    """
    consumer, incarnation = request.consumer, request.incarnation
    if incarnation is None:
        return
    newest = "SELECT incarnation, seen_at FROM incarnations WHERE consumer = ? ORDER BY number DESC LIMIT 1"
    known, seen_at = tx.value(newest, consumer) or (None, 0.0)
    if known == incarnation:
        if seen_at <= tx.at - _SEEN_SECONDS:
            seen = "UPDATE incarnations SET seen_at = ? WHERE consumer = ? AND incarnation = ?"
            tx.execute(seen, tx.at, consumer, incarnation)
        return
    known = "SELECT 1 FROM incarnations WHERE consumer = ? AND incarnation = ?"
    if tx.value(known, consumer, incarnation):
        raise Superseded(f"a newer incarnation of consumer {consumer!r} has taken over from {incarnation!r}")
    tx.execute(
        "INSERT INTO incarnations (consumer, incarnation, seen_at) VALUES (?, ?, ?)", consumer, incarnation, tx.at
    )
    old = "SELECT seq FROM batches WHERE state = 'leased' AND consumer = ? AND incarnation IS DISTINCT FROM ?"
    for (seq,) in tx.rows(f"{old} ORDER BY seq {tx.db.lock}", consumer, incarnation):
        leases.lose(tx, seq, "a new incarnation of the consumer took over")
        tx.count(Count.LEASE_SUPERSEDED)


def _repeated(tx: Transaction, request: LeaseBody) -> list[Lease]:
    """The leases that the same request_id was given before and that still hold: its answer may have been lost."""
    if request.request_id is None:
        return []
    condition = "state = 'leased' AND consumer = ? AND request_id = ?"
    return _read(tx, request, condition, request.consumer, request.request_id)


def _choose(tx: Transaction, request: LeaseBody) -> dict[int, bool]:
    """The first ready batches in the request's order, as many as it may have.

    Returns seq -> whether the batch came back from another lease.
    Each order has an index, so depth does not matter. Raises TooManyInFlight if it may not have one.
    """
    in_flight = InFlight(tx)
    if why := in_flight.refusal(request.run):
        raise TooManyInFlight(why)
    where, values = _condition(Wanted.by(request))
    first = (
        f"SELECT seq, run, uploader, payload_bytes, returned FROM batches WHERE {where} "
        f"ORDER BY {ORDERS[request.order]} LIMIT ? {tx.db.skip_locked}"
    )
    chosen: dict[int, bool] = {}
    size = 0
    most = min(request.most, in_flight.room(request.run))
    for seq, run, uploader, payload_bytes, returned in tx.rows(first, *values, most):
        size += payload_bytes
        why = in_flight.refusal(run)  # a request without a run learns only now which one it counts for
        if chosen and (why or size > MAX_LEASE_BYTES):
            break
        if why:
            raise TooManyInFlight(why)
        in_flight.add(run, uploader)
        chosen[seq] = returned
    return chosen


def _grant(tx: Transaction, chosen: Mapping[int, bool], request: LeaseBody) -> list[Lease]:
    if not chosen:
        return []
    tokens = [value for seq in chosen for value in (seq, secrets.token_urlsafe(24))]
    tx.execute(
        f"""
        UPDATE batches SET state = 'leased', token = granted.column2, consumer = ?, incarnation = ?, request_id = ?,
                           lease_seconds = ?, expires = ?
        FROM (VALUES {several("(?, ?)", chosen)}) AS granted WHERE seq = granted.column1
        """,
        request.consumer,
        request.incarnation,
        request.request_id,
        request.lease_seconds,
        tx.now + request.lease_seconds,
        *tokens,
    )
    tx.note(chosen, State.LEASED, f"to {request.consumer}")
    tx.count(Count.LEASED, len(chosen))
    tx.count(Count.REDELIVERED, sum(chosen.values()))
    return _read(tx, request, f"seq IN ({several('?', chosen)})", *chosen)


def _read(tx: Transaction, request: LeaseBody, condition: str, *values: Value) -> list[Lease]:
    """Leases in the request's order, as many as it wants.

    One statement reads all of them: between two, a lease may end, and its batch be leased to another consumer.
    """
    query = _LEASES.format(order=ORDERS[request.order], condition=condition)
    return [
        Lease(id=id, token=token, lease_seconds=seconds, deliveries=deliveries, bytes=size, body=body, scores=scores)
        for id, token, seconds, deliveries, size, body, scores in tx.rows(query, *values, request.most, LARGE_BYTES)
    ]


def count_leasable(
    tx: Transaction, waiting: Mapping[Wanted, int], alive: Collection[tuple[str, str]]
) -> dict[Wanted, int]:
    for run, lineage in sorted(alive):
        lineages.renew_presence(tx, run, lineage)
    of_runs = "SELECT run FROM depths WHERE state = 'ready' GROUP BY run HAVING sum(batches) > 0"
    ready = {run for (run,) in tx.rows(of_runs)}
    in_flight = InFlight(tx)
    counts = {}
    for wanted, requests in waiting.items():
        if wanted.run is None or wanted.run in ready:
            most = min(requests, in_flight.room(wanted.run))
            where, values = _condition(wanted)
            rows = f"SELECT 1 AS present FROM batches WHERE {where} LIMIT ?"
            counts[wanted] = tx.value(f"SELECT count(*) FROM ({rows}) AS rows", *values, most) if most else 0
    return {wanted: batches for wanted, batches in counts.items() if batches}


def _condition(wanted: Wanted) -> tuple[str, list[Value]]:
    """The SQL condition of the ready batches that a request may get, and its values."""
    if wanted.run is None:
        conditions: dict[str, Value] = {"run <> ?": LEGACY_RUN}
    else:
        conditions = {"run = ?": wanted.run, "lineage = ?": wanted.lineage, "epoch <= ?": wanted.epoch}
    given = {condition: value for condition, value in conditions.items() if value is not None}
    return " AND ".join(["state = 'ready'", *given]), list(given.values())
