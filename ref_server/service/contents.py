"""Builds the API records that show one batch: its tokens, and its rewards."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic_core import to_json

from ref_server.scoring.reference import Reference
from shared.api import PromptView, RewardsView, RowView, TokensView
from shared.batch import Array, RolloutBatch, ScoredBatch
from shared.training import Training


def describe_tokens(batch: RolloutBatch | ScoredBatch, training: Training | None, reference: Reference) -> TokensView:
    """The tokens of a batch with their texts and log-probs, and the rewards of each completion.

    training: what training made of the batch; None if it told nothing.
    """
    rollout = _rollout(batch)
    of_tokens = _rows_of_tokens(batch, training)
    step_ends, step_rewards = _rows_of_steps(rollout)
    prompt = rollout.group.prompt_ids.tolist()
    return TokensView(
        id=rollout.id,
        run=rollout.run,
        task=rollout.task,
        sample=_parsed(rollout.sample),
        temperature=rollout.temperature,
        policy_version=rollout.policy_version,
        trained_step=None if training is None else training.step,
        prompt=PromptView(text=reference.decode(prompt), ids=prompt),
        rows=[
            RowView(
                text=reference.decode(ids),
                ids=ids,
                tokens=list(reference.token_texts(ids)),
                reward=_number(rollout.rewards[i]),
                rewards={name: _number(part[i]) for name, part in rollout.reward_parts.items()},
                step_ends=step_ends[i],
                step_rewards=step_rewards[i],
                finished=bool(rollout.finished[i]),
                **{name: rows[i].tolist() for name, rows in of_tokens.items()},
            )
            for i, ids in enumerate(row.tolist() for row in rollout.group.completions())
        ],
    )


def describe_rewards(batch: RolloutBatch | ScoredBatch) -> RewardsView:
    rollout = _rollout(batch)
    return RewardsView(
        id=rollout.id,
        rewards=_numbers(rollout.rewards),
        parts={name: _numbers(part) for name, part in rollout.reward_parts.items()},
        lengths=rollout.group.completion_lengths.tolist(),
        finished=rollout.finished.tolist(),
    )


def _rollout(batch: RolloutBatch | ScoredBatch) -> RolloutBatch:
    return batch.rollout if isinstance(batch, ScoredBatch) else batch


def _rows_of_tokens(batch: RolloutBatch | ScoredBatch, training: Training | None) -> dict[str, list[Array]]:
    """What there is of a value for each token, (C,), cut into the completions' rows."""
    rollout = _rollout(batch)
    scored = batch if isinstance(batch, ScoredBatch) else None
    values = {
        "loss_mask": rollout.loss_mask,
        "sampler_logps": rollout.sampler_logps,
        "ref_logps": scored and scored.ref_logps,
        "teacher_logps": scored and scored.teacher_logps,
        "logps": training and training.logps,
        "advantages": training and training.advantages,
    }
    ends = np.cumsum(rollout.group.completion_lengths)[:-1]
    return {name: np.split(each, ends) for name, each in values.items() if each is not None}


def _rows_of_steps(rollout: RolloutBatch) -> tuple[Sequence[list[int] | None], Sequence[list[float | None] | None]]:
    """The ends and the rewards of the steps of each completion; None where there are none."""
    if rollout.steps is None:
        return [None] * rollout.group.size, [None] * rollout.group.size
    places = np.cumsum(rollout.steps.counts)[:-1]
    ends, rewards = (np.split(each, places) for each in (rollout.steps.ends, rollout.steps.rewards))
    return [row.tolist() for row in ends], [_numbers(row) for row in rewards]


def _parsed(sample: str | None) -> Any:
    """The client's JSON; None for what could not be JSON again: too deep, or half a character."""
    if sample is None:
        return None
    try:
        value = json.loads(sample, parse_constant=lambda _: None, parse_float=_finite)
        to_json([[[[value]]]])  # a few levels more than where it will stand
        return value
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _numbers(values: Array) -> list[float | None]:
    return [_number(value) for value in values]


def _number(value: np.floating) -> float | None:
    """NaN (no reward) becomes None, since JSON has no NaN."""
    return None if np.isnan(value) else float(value)
