"""Step rewards, mapped from text to tokens, for process supervision (DeepSeekMath, arXiv 2402.03300, 4.1.3)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from policy_trainer.data.problem import Problem, Task
from shared.batch import MAX_REWARD, StepRewards
from shared.errors import UserError

_UNDECODED = "\ufffd"


@dataclass(frozen=True)
class Step:
    """The reward of one step of a completion; NaN if it cannot be judged; the completion then does not train.

    end: number of characters from the beginning of the completion to the end of the step.
    """

    end: int
    reward: float


# (problem, completion) -> the steps of the completion in the order of their ends: a pure function, quick for any text.
# The text is that which rewards judge: it contains the prefill.
StepJudge = Callable[[Problem, str], Sequence[Step]]


def step_judge(task: Task) -> StepJudge | None:
    """The task's method `steps`, if it has one."""
    return getattr(task, "steps", None)


def step_rewards(
    rows: Sequence[Sequence[Step]],
    ids: Sequence[np.ndarray],
    text: Callable[[list[int]], str],
    *,
    start: str = "",
) -> StepRewards:
    """The step rewards of a group. rows: the steps of each completion. ids: its (T,) token ids. text: decodes ids.
    start: the beginning of the answers that stood in the prompt; a step that ends in it ends at the first token.

    A step ends at the token that completes its last character. Steps that end at the same token become one step, whose
    reward is their sum.
    """

    def answer(read: list[int]) -> str:
        return start + text(read)

    merged = [_by_token(steps, tokens.tolist(), answer) for steps, tokens in zip(rows, ids, strict=True)]
    return StepRewards(
        rewards=np.array([reward for row in merged for reward in row.values()], dtype=np.float32),
        ends=np.array([end for row in merged for end in row], dtype=np.int64),
        counts=np.array([len(row) for row in merged], dtype=np.int64),
    )


def _by_token(steps: Sequence[Step], ids: list[int], text: Callable[[list[int]], str]) -> dict[int, float]:
    """{index of the token that ends a step: its reward}, in rising order. Raises UserError for unsorted steps,
    and for rewards that no batch may have."""
    if any(step.end > later.end for step, later in pairwise(steps)):
        raise UserError(f"task: steps must be in the order of their ends, got {[step.end for step in steps]}")
    if any(abs(step.reward) > MAX_REWARD for step in steps):  # false for NaN
        raise UserError(
            f"task: the reward of a step must lie in [-{MAX_REWARD:g}, {MAX_REWARD:g}], "
            f"got {[step.reward for step in steps]}"
        )
    rewards: dict[int, float] = {}
    token = 0
    for step in steps:
        token = _token_of(step.end, ids, text, token)
        rewards[token] = rewards.get(token, 0.0) + step.reward
    return rewards


def _token_of(end: int, ids: list[int], text: Callable[[list[int]], str], low: int) -> int:
    """Index of the first token, from `low` on, at which the text has `end` characters; the last token if none has.

    Bisects over prefixes of the ids: single tokens cannot be decoded, since a character may span several of them.
    """
    high = len(ids) - 1
    while low < high:
        middle = (low + high) // 2
        # An incomplete character decodes to one or more replacement characters at the end.
        if len(text(ids[: middle + 1]).rstrip(_UNDECODED)) >= end:
            high = middle
        else:
            low = middle + 1
    return low
