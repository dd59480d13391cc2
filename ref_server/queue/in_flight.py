"""How many batches are leased and not yet settled, and how many more may be."""

from collections import Counter, defaultdict

from ref_server.queue.share import Share
from ref_server.queue.transaction import Transaction


class InFlight:
    """Leased, unsettled batches by run, beside `max_in_flight` and `max_in_flight_per_run`. One query reads them."""

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
        """Why no batch of the run, or of any, may be leased; None if one may."""
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

    def _share(self, run: str) -> Share:
        # The minimum: a token that uploads to another token's run must not use up the other's share.
        of_uploader = min((self._of_uploader[each] if each else 0 for each in self._uploaders[run]), default=0)
        leased = self._of_run.total()
        return Share(run, self._of_run[run], of_uploader, leased, "batches", "are leased and not settled")


def batches_by_run(tx: Transaction, state: str) -> dict[str, int]:
    """How many batches each run has in a state, where it has any."""
    depths = "SELECT run, CAST(sum(batches) AS BIGINT) FROM depths WHERE state = ?"
    return dict(tx.rows(f"{depths} GROUP BY run HAVING sum(batches) > 0", state))
