"""Scores several jobs in one forward, within a budget of tokens, and finds the job at fault when it fails."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ref_server.metrics.totals import DeviceTotals
from ref_server.scoring.reference import DeviceLost, Replica, Scores
from shared.batch import TokenGroup

# After a forward that did not fit, the budget grows back by this fraction at each forward that fits. The memory may be
# free again (a second model while the reference was replaced), and a budget too large costs only a repeated forward.
_REGROWTH = 16


class Job(Protocol):
    """Groups that are scored together, in one forward."""

    @property
    def groups(self) -> Sequence[TokenGroup]: ...

    @property
    def temperatures(self) -> Sequence[float]:
        """The temperature of each group."""
        ...

    def scored(self, scores: Scores) -> Callable[[], None]:
        """A function that delivers the scores of its groups. Raises BatchError when they are not finite."""
        ...

    def fail(self, error: Exception) -> None:
        """Reports that it cannot be scored."""
        ...


def tokens_of(jobs: Sequence[Job]) -> int:
    """Tokens of all groups, each prompt counted once."""
    return sum(group.tokens for job in jobs for group in job.groups)


class Budget:
    """Most tokens of a forward of several jobs; fewer for a while after memory ran out.

    Attention is not counted: several groups have no more pairs of tokens than one row of the same length. A single
    batch beyond the budget is scored alone.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.tokens = most

    def learn(self, jobs: int, splits: int) -> None:
        """Adapts to a forward. A single job that does not fit says nothing about several."""
        if not splits:
            self.tokens = min(self._most, self.tokens + self._most // _REGROWTH + 1)
        elif jobs > 1:
            self.tokens = max(1, self.tokens // 2)


class Forwards:
    """Scores jobs, and counts time and splits."""

    def __init__(self, budget: Budget, totals: DeviceTotals) -> None:
        self._budget = budget
        self._totals = totals

    def score(self, replica: Replica, jobs: Sequence[Job]) -> None:
        """One forward for all; those that it gives no scores are tried again in halves. So only the job at fault fails,
        and a forward that succeeds is repeated for nobody else. Raises DeviceLost."""
        if not jobs:
            return
        failed, error = self._try(replica, jobs)
        if error is not None and len(jobs) == 1:
            jobs[0].fail(error)
        elif failed:
            del error  # its traceback keeps the forward's memory
            cut = len(failed) // 2
            self.score(replica, failed[:cut])
            self.score(replica, failed[cut:])

    def _try(self, replica: Replica, jobs: Sequence[Job]) -> tuple[Sequence[Job], Exception | None]:
        """The jobs that got no scores, and an error of one of them."""
        try:
            scores = self._forward(replica, jobs)
        except DeviceLost:
            raise
        except Exception as error:  # one job may be at fault
            return jobs, error
        self._budget.learn(len(jobs), scores.splits)
        return self._deliver(jobs, list(scores.shares(len(job.groups) for job in jobs)))

    def _deliver(self, jobs: Sequence[Job], shares: Sequence[Scores]) -> tuple[list[Job], Exception | None]:
        """Those whose scores are not finite get none. Perhaps another of the same forward spoiled them: NaN spreads."""
        failed: list[Job] = []
        last: Exception | None = None
        for job, share in zip(jobs, shares, strict=True):
            try:
                answer = job.scored(share)
            except Exception as error:
                failed.append(job)
                last = error
            else:
                answer()
        return failed, last

    def _forward(self, replica: Replica, jobs: Sequence[Job]) -> Scores:
        groups = [group for job in jobs for group in job.groups]
        temperatures = [temperature for job in jobs for temperature in job.temperatures]
        started = time.monotonic()
        try:
            scores = replica.score(groups, temperatures)
        finally:
            seconds = time.monotonic() - started
            self._totals.working_seconds.inc(seconds)
            self._totals.forward_seconds.observe(seconds)
        self._totals.splits.inc(scores.splits)
        return scores
