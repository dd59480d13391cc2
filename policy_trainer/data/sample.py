"""What a reward is, and the sample that it scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from policy_trainer.data.problem import Problem


@dataclass(frozen=True)
class Sample:
    """One completion of a problem. completion: the whole answer as text, without special tokens.

    tokens: number of sampled tokens, with the EOS. finished: False if it was cut off at the length limit. start: the
    beginning of the answer that stood in the prompt, such as a prefill; `completion` begins with it. ids: the sampled
    tokens.
    """

    problem: Problem
    completion: str
    tokens: int = 0
    finished: bool = True
    start: str = ""
    ids: tuple[int, ...] = ()

    @property
    def sampled(self) -> str:
        """The part of the answer that the model wrote."""
        return self.completion.removeprefix(self.start)


# A failure caused by the completion gets the failing score. NaN means only that the gold answer cannot be judged. None
# leaves the reward out of the completion's total: it does not apply to this problem.
Score = float | None
Reward = Callable[[Sample], Score]


@runtime_checkable
class JudgesTogether(Protocol):
    """A reward that judges many completions in one call."""

    def scores(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """One score for each sample."""
        ...
