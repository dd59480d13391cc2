"""What a reward is, and the sample that it scores."""

from collections.abc import Callable
from dataclasses import dataclass

from policy_trainer.data.problem import Problem


@dataclass(frozen=True)
class Sample:
    """One completion of a problem. completion: its text without special tokens.

    tokens: number of sampled tokens, with the EOS. finished: False if it was cut off at the length limit.
    """

    problem: Problem
    completion: str
    tokens: int = 0
    finished: bool = True


# A failure caused by the completion gets the failing score. NaN means only that the gold answer cannot be judged.
Reward = Callable[[Sample], float]
