"""Step rewards, and their way from text to tokens: process supervision (DeepSeekMath, arXiv 2402.03300, 4.1.3)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np

from policy_trainer.data.problem import Problem
from shared.batch import StepRewards
from shared.errors import UserError

_UNDECODED = "\ufffd"


@dataclass(frozen=True)
class Step:
    """The reward of one step of a completion; NaN where it cannot be judged, and the completion then does not train.

    end: how many characters of the text there are up to the step's end.
    """

    end: int
    reward: float


@runtime_checkable
class JudgesSteps(Protocol):
    """What a task is besides when it judges the steps of a completion too."""

    def steps(self, problem: Problem, completion: str) -> Sequence[Step]:
        """In the order of their ends. Pure, and quick for whatever the text."""
        ...


def step_rewards(
    rows: Sequence[Sequence[Step]], ids: Sequence[np.ndarray], text: Callable[[list[int]], str]
) -> StepRewards:
    """The steps of each completion of a group, given its (T,) token ids; text: what decodes them.

    A step ends at the token that brings its last character. Steps that end at the same token are one, of their sum.
    """
    merged = [_by_token(steps, own.tolist(), text) for steps, own in zip(rows, ids, strict=True)]
    return StepRewards(
        rewards=np.array([reward for row in merged for reward in row.values()], dtype=np.float32),
        ends=np.array([end for row in merged for end in row], dtype=np.int64),
        counts=np.array([len(row) for row in merged], dtype=np.int64),
    )


def _by_token(steps: Sequence[Step], ids: list[int], text: Callable[[list[int]], str]) -> dict[int, float]:
    """Rewards by the index of the token at which they end, in rising order. Raises UserError for what no batch holds."""
    if any(one.end > other.end for one, other in pairwise(steps)):
        raise UserError(f"task: its steps must come in the order of their ends, got {[step.end for step in steps]}")
    if any(math.isinf(step.reward) for step in steps):
        raise UserError(f"task: the reward of a step must not be infinite, got {[step.reward for step in steps]}")
    rewards: dict[int, float] = {}
    token = 0
    for step in steps:
        token = _token_of(step.end, ids, text, token)
        rewards[token] = rewards.get(token, 0.0) + step.reward
    return rewards


def _token_of(end: int, ids: list[int], text: Callable[[list[int]], str], low: int) -> int:
    """The first token from `low` on with which the text has `end` characters; the last one where it never has.

    By bisection, since only whole beginnings decode faithfully: a character may be spread over several tokens.
    """
    high = len(ids) - 1
    while low < high:
        middle = (low + high) // 2
        # What is not a whole character yet decodes to a mark at the end, or to several.
        if len(text(ids[: middle + 1]).rstrip(_UNDECODED)) >= end:
            high = middle
        else:
            low = middle + 1
    return low
