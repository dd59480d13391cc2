"""Expires useless batches: stale (the policy is too old) or abandoned (sampled after the checkpoint of a resume)."""

from collections.abc import Iterator

from ref_server.metrics.activity import Count
from ref_server.queue.transaction import Transaction
from shared.api import LeaseBody, State

# Must match the condition of the index `waiting_by_version`, or SQLite does not use it.
_WAITING = "state IN ('queued', 'ready')"
_REASONS = {Count.EXPIRED_STALE: "stale", Count.EXPIRED_ABANDONED: "abandoned"}


def expire_useless(tx: Transaction, request: LeaseBody) -> None:
    """Expires waiting batches of the request's run that are stale or abandoned for it. Newer epochs are left alone.

    A batch in doubt is leased once more instead of becoming stale: a trainer that has its effect then acks it.
    Abandoned batches are expired even when in doubt: they are newer than the checkpoint that the run resumed from, so
    that checkpoint cannot contain their effect.
    """
    if request.run is None:
        return
    _remember_epoch(tx, request)
    for epoch in _waiting_epochs(tx, request.run, request.epoch):
        if (fork := _fork_version(tx, request, epoch)) is not None:
            _expire(tx, request.run, epoch, "policy_version > ?", fork, Count.EXPIRED_ABANDONED)
        if request.policy_version is not None and request.max_lag is not None:
            oldest = request.policy_version - request.max_lag
            _expire(tx, request.run, epoch, "NOT in_doubt AND policy_version < ?", oldest, Count.EXPIRED_STALE)


def _waiting_epochs(tx: Transaction, run: str, newest: int | None) -> Iterator[int]:
    """Epochs <= `newest` in which the run has waiting batches, newest first. One index lookup per epoch."""
    below = tx.one(
        f"SELECT max(epoch) FROM batches WHERE run = ? AND {_WAITING} AND epoch <= coalesce(?, epoch)", run, newest
    )
    while below is not None:
        yield below
        below = tx.one(f"SELECT max(epoch) FROM batches WHERE run = ? AND {_WAITING} AND epoch < ?", run, below)


def _remember_epoch(tx: Transaction, request: LeaseBody) -> None:
    """Stores the fork version of a new epoch: its first request has the policy version of the resumed checkpoint."""
    if request.epoch is not None and request.policy_version is not None:
        tx.execute(
            "INSERT INTO epochs (run, epoch, fork_version) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
            request.run,
            request.epoch,
            request.policy_version,
        )


def _fork_version(tx: Transaction, request: LeaseBody, epoch: int) -> int | None:
    """The last policy version of `epoch` that the request's epoch continues from; None when no later epoch forked."""
    return tx.one(
        "SELECT min(fork_version) FROM epochs WHERE run = ? AND epoch > ? AND epoch <= ?",
        request.run,
        epoch,
        request.epoch,
    )


def _expire(tx: Transaction, run: str, epoch: int, condition: str, version: int, why: Count) -> None:
    useless = tx.rows(
        f"SELECT seq FROM batches WHERE run = ? AND epoch = ? AND {_WAITING} AND {condition} "
        f"ORDER BY seq {tx.db.skip_locked}",
        run,
        epoch,
        version,
    )
    reason = _REASONS[why]
    for (seq,) in useless:
        tx.move(seq, State.EXPIRED, reason, reason=reason)
        tx.count(why)
