"""Batches that no consumer will want again: too old a policy, or weights that a resumed training left behind."""

from collections.abc import Iterator

from ref_server.metrics.activity import Count
from ref_server.queue.transaction import Transaction
from shared.api import LeaseBody, State

# As the index on waiting batches says it.
_WAITING = "state IN ('queued', 'ready')"
_REASONS = {Count.EXPIRED_STALE: "stale", Count.EXPIRED_ABANDONED: "abandoned"}


def expire_useless(tx: Transaction, request: LeaseBody) -> None:
    """Expires waiting batches of the request's run that are stale or abandoned for it; those of newer epochs stay.

    One that is in doubt is leased once more before it is stale: a trainer that has its effect acks it. What is
    abandoned is newer than the checkpoint that the lineage goes on from, so that its effect is in none.
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
    """Epochs up to `newest` that batches of the run wait in, from the newest on: a look at an index for each."""
    below = tx.one(
        f"SELECT max(epoch) FROM batches WHERE run = ? AND {_WAITING} AND epoch <= coalesce(?, epoch)", run, newest
    )
    while below is not None:
        yield below
        below = tx.one(f"SELECT max(epoch) FROM batches WHERE run = ? AND {_WAITING} AND epoch < ?", run, below)


def _remember_epoch(tx: Transaction, request: LeaseBody) -> None:
    """The first request of a new epoch comes at the version of the checkpoint where it forks off."""
    if request.epoch is not None and request.policy_version is not None:
        tx.execute(
            "INSERT INTO epochs (run, epoch, fork_version) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
            request.run,
            request.epoch,
            request.policy_version,
        )


def _fork_version(tx: Transaction, request: LeaseBody, epoch: int) -> int | None:
    """The last version of `epoch` that is still in the lineage of the request's epoch; None when all of it is."""
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
