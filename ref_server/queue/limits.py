"""How much of each limit a run may use: at most as much as is free. `access/shares.py` has the same rule in memory."""

from collections import Counter, defaultdict
from typing import NamedTuple

from ref_server.queue.errors import NoRoom, QueueFull
from ref_server.queue.transaction import Transaction

# The sum of what a run has and what all runs of its uploader have is at most so many times what is free.
_OF_UPLOADER = 3
# SQL condition: the batches that count against max_batches and max_bytes.
COUNTED = "(state IN ('queued', 'scoring', 'ready') OR state = 'leased' AND NOT started)"


class RunShare(NamedTuple):
    """What a run uses of a limited amount: `of_run`, while all runs together use `of_all`.

    A single run may use half, n runs that want all get 1 / (n + 1) each, and something is always free for another run.
    Clients choose the names of runs, so the uploader counts too: of_uploader is the total of all batches uploaded with
    the same token; 0 without tokens. However many runs a token names, together they get at most three quarters.
    unit, what: for messages, as in `batches` that `wait`.
    """

    run: str
    of_run: int
    of_uploader: int
    of_all: int
    unit: str
    what: str

    def refusal(self, size: int, most: int, limit: str, most_of_run: int) -> str | None:
        """Why the run may not have `size` more; None if it may. limit: the name of `most`."""
        used = f"{self.of_run} {self.unit} of run {self.run!r} {self.what}"
        if self.of_run + size > most_of_run:
            return f"{used}, this is {size} more and {limit}_per_run is {most_of_run}"
        free = most - self.of_all
        if self.of_run + size > free - size:
            return f"{used}, this is {size} more, and at most as many as are free may: {free} are, {limit} is {most}"
        if self.of_uploader and self.of_uploader + size + self.of_run + size > _OF_UPLOADER * (free - size):
            return (
                f"{used}, and {self.of_uploader} of all runs of its token; with {size} more for each, the sum would "
                f"exceed {_OF_UPLOADER} times what is free: {free} are free, {limit} is {most}. A run with a token of "
                "its own gets more"
            )
        return None

    def room(self, most: int, most_of_run: int) -> int:
        """How many more of size 1 the run may have."""
        free = most - self.of_all
        room = min(most_of_run - self.of_run, (free - self.of_run) // 2)
        if self.of_uploader:
            room = min(room, (_OF_UPLOADER * free - self.of_uploader - self.of_run) // (_OF_UPLOADER + 2))
        return max(0, room)


def check_waiting(tx: Transaction, run: str, uploader: str, payload_bytes: int) -> None:
    """Raises QueueFull if one more batch of payload_bytes would exceed a limit, or the share of it that the run or its
    uploader may use.
    """
    limits = tx.limits
    batches, size, of_run, size_of_run, of_uploader, size_of_uploader = tx.value(
        f"""
        SELECT CAST(coalesce(sum(batches), 0) AS BIGINT),
               CAST(coalesce(sum(payload_bytes), 0) AS BIGINT),
               CAST(coalesce(sum(batches) FILTER (WHERE run = ?), 0) AS BIGINT),
               CAST(coalesce(sum(payload_bytes) FILTER (WHERE run = ?), 0) AS BIGINT),
               CAST(coalesce(sum(batches) FILTER (WHERE uploader = ? AND uploader <> ''), 0) AS BIGINT),
               CAST(coalesce(sum(payload_bytes) FILTER (WHERE uploader = ? AND uploader <> ''), 0) AS BIGINT)
        FROM depths WHERE {COUNTED}
        """,
        run,
        run,
        uploader,
        uploader,
    )
    count = RunShare(run, of_run, of_uploader, batches, "batches", "wait")
    if why := count.refusal(1, limits.max_batches, "max_batches", limits.max_batches_per_run):
        raise NoRoom(why, run)
    volume = RunShare(run, size_of_run, size_of_uploader, size, "bytes", "wait")
    _check_bytes(volume, payload_bytes, limits.max_bytes, "max_bytes", limits.max_bytes_per_run)
    _check_stored(tx, run, uploader, payload_bytes)


def _check_stored(tx: Transaction, run: str, uploader: str, payload_bytes: int) -> None:
    """Likewise for the bytes of unsettled batches."""
    unsettled, of_run, of_uploader = tx.value(
        """
        SELECT CAST(coalesce(sum(payload_bytes), 0) AS BIGINT),
               CAST(coalesce(sum(payload_bytes) FILTER (WHERE run = ?), 0) AS BIGINT),
               CAST(coalesce(sum(payload_bytes) FILTER (WHERE uploader = ? AND uploader <> ''), 0) AS BIGINT)
        FROM depths WHERE state IN ('queued', 'scoring', 'ready', 'leased')
        """,
        run,
        uploader,
    )
    most = tx.limits.max_stored_bytes
    share = RunShare(run, of_run, of_uploader, unsettled, "bytes", "wait or are leased")
    _check_bytes(share, payload_bytes, most, "max_stored_bytes", most)


def _check_bytes(share: RunShare, size: int, most: int, limit: str, most_of_run: int) -> None:
    if why := share.refusal(size, most, limit, most_of_run):
        # There was no room for a large batch: there may be for smaller ones.
        raise NoRoom(why, share.run) if size <= most // 100 else QueueFull(why)


class InFlight:
    """Leased, unsettled batches by run, and max_in_flight and max_in_flight_per_run. A single query reads them."""

    def __init__(self, tx: Transaction) -> None:
        self._limits = tx.limits
        self._of_run: Counter[str] = Counter()
        self._of_uploader: Counter[str] = Counter()
        self._uploaders: defaultdict[str, set[str]] = defaultdict(set)
        leased = "CAST(coalesce(sum(batches) FILTER (WHERE state = 'leased'), 0) AS BIGINT)"
        of_runs = f"SELECT run, uploader, {leased} FROM depths WHERE state IN ('ready', 'leased')"
        for run, uploader, batches in tx.rows(f"{of_runs} GROUP BY run, uploader HAVING sum(batches) > 0"):
            self._of_run[run] += batches
            self._of_uploader[uploader] += batches
            self._uploaders[run].add(uploader)

    def refusal(self, run: str | None) -> str | None:
        """Why no batch of the run, or of any run, may be leased; None if one may."""
        if run is not None:
            limits = self._limits
            return self._share(run).refusal(1, limits.max_in_flight, "max_in_flight", limits.max_in_flight_per_run)
        leased, most = self._of_run.total(), self._limits.max_in_flight
        return f"{leased} batches are leased and not settled; max_in_flight is {most}" if leased >= most else None

    def room(self, run: str | None) -> int:
        """How many more may be leased to requests of a run, or to those that name none."""
        if run is not None:
            return self._share(run).room(self._limits.max_in_flight, self._limits.max_in_flight_per_run)
        return max(0, self._limits.max_in_flight - self._of_run.total())

    def add(self, run: str, uploader: str) -> None:
        """Counts one more leased batch, for its run and for the token that it was uploaded with."""
        self._of_run[run] += 1
        self._of_uploader[uploader] += 1

    def _share(self, run: str) -> RunShare:
        # The minimum: a token that uploads to another token's run must not use up the other's share.
        of_uploader = min((self._of_uploader[each] if each else 0 for each in self._uploaders[run]), default=0)
        leased = self._of_run.total()
        return RunShare(run, self._of_run[run], of_uploader, leased, "batches", "are leased and not settled")
