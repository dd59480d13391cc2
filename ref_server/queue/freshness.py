"""Expires useless batches: stale (the policy is too old) or abandoned (sampled after the checkpoint of a resume)."""

from collections.abc import Iterator

from ref_server.metrics.activity import Count
from ref_server.queue.errors import EpochAhead
from ref_server.queue.indexes import WAITING
from ref_server.queue.transaction import Transaction
from shared.api import LeaseBody, State

# A trainer opens its epoch with a lease request before it publishes weights of it, so no sampler is ahead. One more is
# allowed, since a power cut may undo that request, which waits for no flush.
_MOST_AHEAD = 1
_OF_LINEAGE = "run = ? AND lineage = ?"
_REASONS = {Count.EXPIRED_STALE: "stale", Count.EXPIRED_ABANDONED: "abandoned"}


def check_epoch(tx: Transaction, run: str, lineage: str, epoch: int) -> None:
    """Raises EpochAhead if a trainer has opened epochs of the lineage, and this one is not near them."""
    newest = tx.one(f"SELECT max(epoch) FROM epochs WHERE {_OF_LINEAGE}", run, lineage)
    if newest is not None and epoch > newest + _MOST_AHEAD:
        most = newest + _MOST_AHEAD
        raise EpochAhead(f"epoch: must be at most {most}, since the trainer of run {run!r} is in {newest}; got {epoch}")


def expire_useless(tx: Transaction, request: LeaseBody) -> None:
    """Expires waiting batches of the request's lineage that are stale or abandoned for it. Newer epochs are left alone.

    A batch in doubt is leased once more instead of becoming stale: a trainer that has its effect then acks it.
    Abandoned batches are expired even when in doubt: they are newer than the checkpoint that the run resumed from, so
    that checkpoint cannot contain their effect.
    """
    if request.run is None:
        return
    _remember_epoch(tx, request)
    for epoch in _waiting_epochs(tx, request):
        if (fork := _fork_version(tx, request, epoch)) is not None:
            _expire(tx, request, epoch, "policy_version > ?", fork, Count.EXPIRED_ABANDONED)
        if request.policy_version is not None and request.max_lag is not None:
            oldest = request.policy_version - request.max_lag
            _expire(tx, request, epoch, "NOT in_doubt AND policy_version < ?", oldest, Count.EXPIRED_STALE)


def _waiting_epochs(tx: Transaction, request: LeaseBody) -> Iterator[int]:
    """Epochs up to the request's in which its lineage has waiting batches, newest first. One index lookup per epoch."""
    newest = f"SELECT max(epoch) FROM batches WHERE {_OF_LINEAGE} AND {WAITING}"
    whose = (request.run, request.own_lineage)
    below = tx.one(f"{newest} AND epoch <= coalesce(?, epoch)", *whose, request.epoch)
    while below is not None:
        yield below
        below = tx.one(f"{newest} AND epoch < ?", *whose, below)


def _remember_epoch(tx: Transaction, request: LeaseBody) -> None:
    """Stores the fork version of a new epoch: its first request has the policy version of the resumed checkpoint."""
    if request.epoch is not None and request.policy_version is not None:
        tx.execute(
            "INSERT INTO epochs (run, lineage, epoch, fork_version) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
            request.run,
            request.own_lineage,
            request.epoch,
            request.policy_version,
        )


def _fork_version(tx: Transaction, request: LeaseBody, epoch: int) -> int | None:
    """The last policy version of `epoch` that the request's epoch continues from; None when no later epoch forked."""
    return tx.one(
        f"SELECT min(fork_version) FROM epochs WHERE {_OF_LINEAGE} AND epoch > ? AND epoch <= ?",
        request.run,
        request.own_lineage,
        epoch,
        request.epoch,
    )


def _expire(tx: Transaction, request: LeaseBody, epoch: int, condition: str, version: int, why: Count) -> None:
    useless = tx.rows(
        f"SELECT seq FROM batches WHERE {_OF_LINEAGE} AND epoch = ? AND {WAITING} AND {condition} "
        f"ORDER BY seq {tx.db.skip_locked}",
        request.run,
        request.own_lineage,
        epoch,
        version,
    )
    reason = _REASONS[why]
    for (seq,) in useless:
        tx.move(seq, State.EXPIRED, reason, reason=reason)
        tx.count(why)
