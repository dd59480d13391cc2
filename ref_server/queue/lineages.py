"""Lineages: which training owns a run name, and when a batch is useless: stale, abandoned or finished.

A run's name does not identify it: a directory is deleted and begun again, or two directories have one name. So each
training has a lineage, a random name; clients that name none share the lineage ''. A run is held by the lineage that
leased last. It is present for a while after each sign of life, and until then no other lineage gets the run.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ref_server.metrics import Count
from ref_server.queue.errors import EpochAhead, RunTaken
from ref_server.queue.schema import WAITING
from ref_server.queue.transaction import Transaction, Value
from shared.api import LeaseBody, State

# How long a lineage without leases is present after its last request. Trainers ask more often than that.
PRESENCE_SECONDS = 10.0
# A sign of life is written down at most this often: polls come several times a second.
_HEARD_SECONDS = 1.0
REASONS = {Count.EXPIRED_ABANDONED: "abandoned", Count.EXPIRED_FINISHED: "finished", Count.EXPIRED_STALE: "stale"}
# A trainer opens its epoch with a lease request before it publishes weights of it, so no sampler is ahead. One more is
# allowed, since a power cut may undo that request, which waits for no flush.
_MOST_AHEAD = 1
_OF_LINEAGE = "run = ? AND lineage = ?"


class _Holder(NamedTuple):
    """The owner of a run. heard: its last sign of life, on the clock of leases. seconds: how long that counts."""

    lineage: str
    heard: float
    seconds: float
    finished: bool


def grant_grace(tx: Transaction) -> None:
    """Restarts the presence of every lineage: it could not be heard while the queue was down."""
    tx.execute("UPDATE runs SET heard = ?", tx.now)


def enter(tx: Transaction, request: LeaseBody) -> None:
    """Makes the request's lineage the owner of its run. Raises RunTaken while another lineage is present."""
    if request.run is None:
        return
    run, lineage = request.run, request.lineage_name
    holder = _holder(tx, run)
    if holder is None or holder.lineage != lineage or holder.finished:
        if not _take(tx, run, lineage, finished=False):
            raise _taken(tx, run)
        tx.execute("DELETE FROM epochs WHERE run = ? AND lineage <> ?", run, lineage)


def abandon_others(tx: Transaction, request: LeaseBody) -> None:
    """Expires what other lineages of the request's run left waiting."""
    if request.run is None:
        return
    for others in ("lineage < ?", "lineage > ?"):  # two ranges of the index
        _expire_waiting(tx, Count.EXPIRED_ABANDONED, f"run = ? AND {others}", request.run, request.lineage_name)


def renew_presence(tx: Transaction, run: str | None, lineage: str) -> None:
    """Prolongs the presence of a lineage that holds its run: a sign of life has come.

    Heartbeats are a part of a lease's time apart, so a lineage with leases is present for half of the longest.
    """
    longest = tx.value(
        "SELECT max(lease_seconds) FROM batches WHERE state = 'leased' AND run = ? AND lineage = ?", run, lineage
    )
    seconds = max(PRESENCE_SECONDS, (longest or 0.0) / 2)
    tx.execute(
        "UPDATE runs SET heard = ?, seconds = ? "
        "WHERE run = ? AND lineage = ? AND NOT finished AND (heard <= ? OR seconds <> ?)",
        tx.now, seconds, run, lineage, tx.now - _HEARD_SECONDS, seconds,
    )  # fmt: skip


def finish(tx: Transaction, run: str, lineage: str) -> int:
    """Ends a lineage: what waits of it expires now, what comes later at once. Its next lease undoes that.

    Returns how many batches expired.
    """
    tx.db.serialise("admission")  # a concurrent upload comes before or after; else its batch would wait forever
    _take(tx, run, lineage, finished=True)  # not where another lineage is present: then nothing is left to end
    return _expire_waiting(tx, Count.EXPIRED_FINISHED, _OF_LINEAGE, run, lineage)


def useless(tx: Transaction, run: str, lineage: str) -> Count | None:
    """Why a batch of this lineage would never be leased: it is finished, or another one is present. None if it may."""
    holder = _holder(tx, run)
    if holder is None:
        return None
    if holder.lineage == lineage:
        return Count.EXPIRED_FINISHED if holder.finished else None
    return Count.EXPIRED_ABANDONED if holder.heard + holder.seconds > tx.now else None


def expire(tx: Transaction, seq: int, why: Count) -> None:
    tx.move(seq, State.EXPIRED, REASONS[why], reason=REASONS[why])
    tx.count(why)


def expire_if_useless(tx: Transaction, seq: int) -> None:
    """To be called when a batch is ready again: its run may have ended meanwhile."""
    run, lineage = tx.value("SELECT run, lineage FROM batches WHERE seq = ?", seq)
    # A concurrent `finish` comes before or after; else the batch would wait forever.
    tx.execute(f"SELECT 1 FROM runs WHERE run = ? {tx.db.lock}", run)
    if why := useless(tx, run, lineage):
        expire(tx, seq, why)


def _holder(tx: Transaction, run: str) -> _Holder | None:
    row = tx.value(f"SELECT {', '.join(_Holder._fields)} FROM runs WHERE run = ?", run)
    return None if row is None else _Holder(*row)


def _take(tx: Transaction, run: str, lineage: str, *, finished: bool) -> bool:
    """Whether the lineage owns the run now. One statement: of two concurrent lineages one is refused."""
    taken = """
        INSERT INTO runs (run, lineage, heard, seconds, finished) VALUES (?, ?, ?, ?, ?)
        ON CONFLICT (run) DO UPDATE
        SET lineage = excluded.lineage, heard = excluded.heard, seconds = excluded.seconds, finished = excluded.finished
        WHERE runs.lineage = excluded.lineage OR runs.heard + runs.seconds <= excluded.heard
        RETURNING run
    """
    return bool(tx.rows(taken, run, lineage, tx.now, 0.0 if finished else PRESENCE_SECONDS, finished))


def _taken(tx: Transaction, run: str) -> RunTaken:
    holder = _holder(tx, run)
    assert holder is not None, "it was not given"
    heard = max(0.0, tx.now - holder.heard)
    return RunTaken(
        f"run {run!r} is another training's, which was heard {heard:.0f} s ago: stop that one, or choose another run",
        retry_after=max(0.0, holder.seconds - heard),
    )


def _expire_waiting(tx: Transaction, why: Count, condition: str, *values: Value) -> int:
    """Expires the waiting batches that meet an SQL condition. Returns how many."""
    rows = tx.rows(f"SELECT seq FROM batches WHERE {condition} AND {WAITING} ORDER BY seq {tx.db.skip_locked}", *values)
    for (seq,) in rows:
        expire(tx, seq, why)
    return len(rows)


def check_epoch(tx: Transaction, run: str, lineage: str, epoch: int) -> None:
    """Raises EpochAhead if a trainer has opened epochs of the lineage, and this one is not near them."""
    newest = tx.value(f"SELECT max(epoch) FROM epochs WHERE {_OF_LINEAGE}", run, lineage)
    if newest is not None and epoch > newest + _MOST_AHEAD:
        most = newest + _MOST_AHEAD
        raise EpochAhead(f"epoch: must be at most {most}, since the trainer of run {run!r} is in {newest}; got {epoch}")


def expire_useless(tx: Transaction, request: LeaseBody) -> None:
    """Expires waiting batches of the request's lineage that are stale or abandoned for it. Newer epochs stay.

    A batch in doubt is leased once more instead of becoming stale: a trainer that has its effect then acks it.
    Abandoned batches are expired even when in doubt: they are newer than the checkpoint that the run resumed from, so
    that checkpoint cannot contain their effect.
    """
    if request.run is None:
        return
    lineage = (request.run, request.lineage_name)
    if request.epoch is not None and request.policy_version is not None:
        # The first request of an epoch has the policy version of the checkpoint that the run resumed from.
        fork = "INSERT INTO epochs (run, lineage, epoch, fork_version) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
        tx.execute(fork, *lineage, request.epoch, request.policy_version)
    # The last policy version of an epoch that the request's epoch continues from; NULL when no later epoch forked.
    last = f"SELECT min(fork_version) FROM epochs WHERE {_OF_LINEAGE} AND epoch > ? AND epoch <= ?"
    for epoch in _waiting_epochs(tx, request):
        of_epoch, values = f"{_OF_LINEAGE} AND epoch = ?", (*lineage, epoch)
        if (fork_version := tx.value(last, *values, request.epoch)) is not None:
            newer = f"{of_epoch} AND policy_version > ?"
            _expire_waiting(tx, Count.EXPIRED_ABANDONED, newer, *values, fork_version)
        if request.policy_version is not None and request.max_lag is not None:
            older = f"{of_epoch} AND NOT in_doubt AND policy_version < ?"
            _expire_waiting(tx, Count.EXPIRED_STALE, older, *values, request.policy_version - request.max_lag)


def _waiting_epochs(tx: Transaction, request: LeaseBody) -> Iterator[int]:
    """Epochs up to the request's in which its lineage has waiting batches, newest first. One index lookup per epoch."""
    newest = f"SELECT max(epoch) FROM batches WHERE {_OF_LINEAGE} AND {WAITING}"
    lineage = (request.run, request.lineage_name)
    below = tx.value(f"{newest} AND epoch <= coalesce(?, epoch)", *lineage, request.epoch)
    while below is not None:
        yield below
        below = tx.value(f"{newest} AND epoch < ?", *lineage, below)
