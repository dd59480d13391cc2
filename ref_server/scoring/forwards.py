"""Jobs scored together: what a forward is made of, how large it may be, and what happens when it fails."""

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from ref_server.metrics.totals import ScoringTotals
from ref_server.scoring.reference import DeviceLost, Reference, Scores
from shared.batch import TokenGroup

# After a forward that did not fit, the budget grows back by this part of the whole at a time: what took the memory may
# be gone (another model while the reference was replaced), and too many tokens cost but a forward that is done again.
_REGROWTH = 16


class Job(Protocol):
    """What somebody wants scored, all of it in one forward."""

    @property
    def groups(self) -> Sequence[TokenGroup]: ...

    @property
    def temperatures(self) -> Sequence[float]:
        """The temperature of each group."""
        ...

    def scored(self, scores: Scores) -> Callable[[], None]:
        """How to hand on the scores of its groups. Raises BatchError when they are not finite."""
        ...

    def fail(self, error: Exception) -> None:
        """Tells that it cannot be scored."""
        ...


def tokens_of(jobs: Sequence[Job]) -> int:
    """Prompts once and all completions."""
    return sum(group.tokens for job in jobs for group in job.groups)


class Budget:
    """Tokens of a forward of several jobs: fewer for a while after memory did not suffice.

    Attention is not counted: groups of so many tokens have no more pairs of them than a single row of that length. What
    one batch beyond the budget costs is no question of packing, since it goes alone.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.tokens = most

    def learn(self, jobs: int, splits: int) -> None:
        """From a forward. One that is too large alone says nothing of several."""
        if not splits:
            self.tokens = min(self._most, self.tokens + self._most // _REGROWTH + 1)
        elif jobs > 1:
            self.tokens = max(1, self.tokens // 2)


class Forwards:
    """Scores jobs, and keeps account of it."""

    def __init__(self, budget: Budget, totals: ScoringTotals) -> None:
        self._budget = budget
        self._totals = totals

    def score(self, reference: Reference, jobs: Sequence[Job]) -> None:
        """One forward for all, or, if it fails, for each half: only the job at fault fails. Raises DeviceLost."""
        error = self._try(reference, jobs) if jobs else None
        if error is None:
            return
        if len(jobs) == 1:
            jobs[0].fail(error)
            return
        del error  # its traceback holds what the forward took
        cut = len(jobs) // 2
        self.score(reference, jobs[:cut])
        self.score(reference, jobs[cut:])

    def _try(self, reference: Reference, jobs: Sequence[Job]) -> Exception | None:
        """Nobody is told anything unless the scores of all are good."""
        try:
            scores = self._forward(reference, jobs)
            logps = iter(scores.logps)
            shares = [Scores(list(islice(logps, len(job.groups))), scores.reference_version) for job in jobs]
            answers = [job.scored(share) for job, share in zip(jobs, shares, strict=True)]
        except DeviceLost:
            raise
        except Exception as error:  # whatever it is, it may be the fault of one job
            return error
        self._budget.learn(len(jobs), scores.splits)
        for answer in answers:
            answer()
        return None

    def _forward(self, reference: Reference, jobs: Sequence[Job]) -> Scores:
        groups = [group for job in jobs for group in job.groups]
        temperatures = [temperature for job in jobs for temperature in job.temperatures]
        started = time.monotonic()
        try:
            scores = reference.score(groups, temperatures)
        finally:
            seconds = time.monotonic() - started
            self._totals.working_seconds.inc(seconds)
            self._totals.forward_seconds.observe(seconds)
        self._totals.splits.inc(scores.splits)
        return scores
