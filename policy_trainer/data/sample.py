"""What a reward sees, and what it is."""

from collections.abc import Callable
from dataclasses import dataclass

from policy_trainer.data.problem import Problem


@dataclass(frozen=True)
class Sample:
    """One completion of a problem. completion: its text without special tokens.

    tokens: how many were sampled, EOS included. finished: ended by itself, rather than cut off at the length limit.
    """

    problem: Problem
    completion: str
    tokens: int = 0
    finished: bool = True


# What the completion causes gets the failing score; NaN only says that the gold answer cannot be judged.
Reward = Callable[[Sample], float]
