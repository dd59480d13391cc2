"""Builds the API records that describe the queue, and one batch's tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ref_server.metrics.activity import Count
from ref_server.metrics.totals import ScoringTotals
from ref_server.queue.records import Stats
from ref_server.scoring.reference import Reference
from shared.api import Depth, LimitsView, PromptView, QueueView, RowView, ScoringView, State, TokensView
from shared.batch import RolloutBatch, ScoredBatch


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


def describe_tokens(batch: RolloutBatch | ScoredBatch, reference: Reference) -> TokensView:
    """The tokens of a batch with their texts and log-probs, and the rewards of each completion."""
    rollout = batch.rollout if isinstance(batch, ScoredBatch) else batch
    ref_logps = batch.ref_logps if isinstance(batch, ScoredBatch) else None
    sampler_rows, reference_rows = _rows(rollout, rollout.sampler_logps), _rows(rollout, ref_logps)
    prompt = rollout.group.prompt_ids.tolist()
    return TokensView(
        id=rollout.id,
        prompt=PromptView(text=reference.decode(prompt), ids=prompt),
        rows=[
            RowView(
                text=reference.decode(ids.tolist()),
                ids=ids.tolist(),
                tokens=token_texts(reference, ids.tolist()),
                sampler_logps=sampler_rows[i],
                ref_logps=reference_rows[i],
                reward=_number(rollout.rewards[i]),
                rewards={name: _number(part[i]) for name, part in rollout.reward_parts.items()},
                finished=bool(rollout.finished[i]),
            )
            for i, ids in enumerate(rollout.group.completions())
        ],
    )


def token_texts(reference: Reference, ids: Sequence[int]) -> list[str | None]:
    return [reference.decode([token]) for token in ids]


def _rows(rollout: RolloutBatch, values: np.ndarray | None) -> list[list[float] | None]:
    """(C,) values per token -> one list per completion; a list of None where values is None."""
    if values is None:
        return [None] * rollout.group.size
    return [part.tolist() for part in np.split(values, np.cumsum(rollout.group.completion_lengths)[:-1])]


def _number(value: np.floating) -> float | None:
    """NaN (no reward) becomes None, since JSON has no NaN."""
    return None if np.isnan(value) else float(value)
