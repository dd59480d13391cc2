"""What the server tells people and tools of its queue, as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ref_server.metrics.activity import Count
from ref_server.metrics.totals import ScoringTotals
from ref_server.queue.interface import Limits, State, Stats
from ref_server.scoring.reference import Reference
from shared.batch import RolloutBatch, ScoredBatch


def describe_queue(stats: Stats, counts: Mapping[Count, int], totals: ScoringTotals, limits: Limits) -> dict[str, Any]:
    """Counts and bytes by run and state, the age of the oldest waiting batch, and the scorer's throughput.

    counts: what this process has done in the queue since it started.
    """
    runs: dict[str, dict[str, dict[str, int]]] = {}
    states: dict[str, dict[str, int]] = {state: {"batches": 0, "bytes": 0} for state in State}
    for depth in stats.depths:
        count = {"batches": depth.batches, "bytes": depth.payload_bytes}
        runs.setdefault(depth.run, {})[depth.state] = count
        for key, value in count.items():
            states[depth.state][key] += value
    return {
        "states": states,
        "runs": runs,
        "oldest_age_seconds": stats.oldest_age,
        "scoring": _scoring(totals),
        "limits": asdict(limits),
        "since_start": counts,
    }


def _scoring(totals: ScoringTotals) -> dict[str, float]:
    """Histograms are for machines: `/metrics` has them."""
    counts = totals.counts()
    scored, seconds = counts["tokens"] + counts["direct_tokens"], counts["working_seconds"]
    return {**counts, "tokens_per_second": scored / seconds if seconds else 0.0}


def describe_tokens(batch: RolloutBatch | ScoredBatch, reference: Reference) -> dict[str, Any]:
    """Each token of a batch with its text and log-probs, each row with its rewards."""
    rollout = batch.rollout if isinstance(batch, ScoredBatch) else batch
    ref_logps = batch.ref_logps if isinstance(batch, ScoredBatch) else None
    sampler_rows, reference_rows = _rows(rollout, rollout.sampler_logps), _rows(rollout, ref_logps)
    prompt = rollout.group.prompt_ids.tolist()
    return {
        "id": rollout.id,
        "prompt": {"text": reference.decode(prompt), "ids": prompt},
        "rows": [
            {
                "text": reference.decode(ids.tolist()),
                "ids": ids.tolist(),
                "tokens": token_texts(reference, ids.tolist()),
                "sampler_logps": sampler_rows[i],
                "ref_logps": reference_rows[i],
                "reward": _number(rollout.rewards[i]),
                "rewards": {name: _number(part[i]) for name, part in rollout.reward_parts.items()},
                "finished": bool(rollout.finished[i]),
            }
            for i, ids in enumerate(rollout.group.completions())
        ],
    }


def token_texts(reference: Reference, ids: Sequence[int]) -> list[str | None]:
    return [reference.decode([token]) for token in ids]


def _rows(rollout: RolloutBatch, values: np.ndarray | None) -> list[list[float] | None]:
    """(C,) values of all tokens, cut into rows; None for each row where there are none."""
    if values is None:
        return [None] * rollout.group.size
    return [part.tolist() for part in np.split(values, np.cumsum(rollout.group.completion_lengths)[:-1])]


def _number(value: Any) -> float | None:
    """JSON has no NaN: a completion that could not be judged shows null."""
    return None if np.isnan(value) else float(value)
