"""Builds the API records that describe the queue."""

from collections.abc import Mapping
from dataclasses import dataclass

from ref_server.metrics.activity import Count
from ref_server.metrics.totals import ScoringTotals
from ref_server.queue.records import Stats
from shared.api import Depth, LimitsView, QueueView, ScoringView, State


@dataclass(frozen=True)
class Runs:
    """Which runs to tell of, by name: a page of them, or one. confined: the totals are those of that one, too."""

    limit: int
    after: str | None = None
    only: str | None = None
    confined: bool = False


def describe_queue(
    stats: Stats, runs: Runs, counts: Mapping[Count, int], totals: ScoringTotals, limits: LimitsView
) -> QueueView:
    """The record of `GET /v1/queue`. counts: events since this process started."""
    if runs.only is None:
        names = sorted(name for name in stats.runs if runs.after is None or name > runs.after)
    else:
        names = [runs.only] if runs.only in stats.runs else []
    page = names[: runs.limit]
    of_all = {name: stats.runs[name] for name in page} if runs.confined else stats.runs
    states = {state: _sum_depths(of_all, state) for state in State}
    return QueueView(
        states=states,
        runs={name: stats.runs[name] for name in page},
        next_cursor=page[-1] if len(names) > len(page) else None,
        stored_bytes=sum(depth.bytes for depth in states.values()),
        oldest_age_seconds=stats.oldest_age,
        scoring=_scoring(totals),
        limits=limits,
        since_start={str(count): times for count, times in counts.items()},
    )


def _scoring(totals: ScoringTotals) -> ScoringView:
    """Totals of the scoring loop. The histograms are left out: `/metrics` has them."""
    counts = totals.counts()
    scored, seconds = counts["tokens"] + counts["direct_tokens"], counts["working_seconds"]
    return ScoringView.model_validate({**counts, "tokens_per_second": scored / seconds if seconds else 0.0})


def _sum_depths(runs: Mapping[str, Mapping[State, Depth]], state: State) -> Depth:
    depths = [states[state] for states in runs.values() if state in states]
    return Depth(batches=sum(depth.batches for depth in depths), bytes=sum(depth.bytes for depth in depths))
