"""Lineages: whose a run is, and what becomes of batches that other trainings of its name left.

A run's name does not identify it: a directory is deleted and begun again, or two directories have one name. So each
training has a lineage, a random name; clients that name none share the lineage ''. A run is held by the lineage that
leased last. It is present for a while after each sign of life, and until then no other lineage gets the run.
"""

from typing import NamedTuple

from ref_server.metrics.activity import Count
from ref_server.queue.errors import RunTaken
from ref_server.queue.indexes import WAITING
from ref_server.queue.transaction import Transaction
from shared.api import LeaseBody, State

# How long a lineage without leases is present after it was last heard of. Trainers ask more often than that.
PRESENCE_SECONDS = 10.0
# A sign of life is written down at most this often: polls come several times a second.
_HEARD_SECONDS = 1.0
REASONS = {Count.EXPIRED_ABANDONED: "abandoned", Count.EXPIRED_FINISHED: "finished"}


class _Holder(NamedTuple):
    """Whose a run is. heard: when, on the clock of leases; present for so many seconds after that."""

    lineage: str
    heard: float
    seconds: float
    finished: bool


def grant_grace(tx: Transaction) -> None:
    """Restarts the presence of every lineage: it could not be heard while the queue was down."""
    tx.execute("UPDATE runs SET heard = ?", tx.now)


def enter(tx: Transaction, request: LeaseBody) -> None:
    """Makes the run the request's lineage's. Raises RunTaken while another lineage is present."""
    if request.run is None:
        return
    run, lineage = request.run, request.own_lineage
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
        _expire_waiting(tx, request.run, others, request.own_lineage, Count.EXPIRED_ABANDONED)


def hear(tx: Transaction, run: str | None, lineage: str) -> None:
    """Prolongs the presence of a lineage that holds its run: a sign of life has come.

    Heartbeats are a part of a lease's time apart, so a lineage with leases is present for half of the longest.
    """
    longest = tx.one(
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
    tx.db.serialise("admission")  # an upload under way is seen here, or sees the end: else it would wait for ever
    _take(tx, run, lineage, finished=True)  # not where another lineage is present: then nothing is left to end
    return _expire_waiting(tx, run, "lineage = ?", lineage, Count.EXPIRED_FINISHED)


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
    run, lineage = tx.one("SELECT run, lineage FROM batches WHERE seq = ?", seq)
    # An end under way is waited for, or waits and sees the batch: else the batch would wait for ever.
    tx.execute(f"SELECT 1 FROM runs WHERE run = ? {tx.db.lock}", run)
    if why := useless(tx, run, lineage):
        expire(tx, seq, why)


def _holder(tx: Transaction, run: str) -> _Holder | None:
    row = tx.one(f"SELECT {', '.join(_Holder._fields)} FROM runs WHERE run = ?", run)
    return None if row is None else _Holder(*row)


def _take(tx: Transaction, run: str, lineage: str, *, finished: bool) -> bool:
    """Whether the run is the lineage's now. One statement, so that of two lineages that come at once one is refused."""
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


def _expire_waiting(tx: Transaction, run: str, lineages: str, lineage: str, why: Count) -> int:
    found = tx.rows(
        f"SELECT seq FROM batches WHERE run = ? AND {lineages} AND {WAITING} {tx.db.skip_locked}", run, lineage
    )
    for (seq,) in found:
        expire(tx, seq, why)
    return len(found)
