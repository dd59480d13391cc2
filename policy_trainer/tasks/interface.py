"""What a task is: problems by index, a set that is never trained on, and a judge."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from policy_trainer.rewards import Comparison

Message = Mapping[str, str]


@dataclass(frozen=True)
class Problem:
    """One prompt and its gold answer. messages go through the model's chat template; prompt is taken as it is."""

    answer: str
    messages: tuple[Message, ...] = ()
    prompt: str = ""


class Task(Protocol):
    name: str
    compare: Comparison
    default_rewards: tuple[str, ...]

    def problem(self, index: int) -> Problem:
        """The training problem of this index: a pure function of the task's seed and the index."""
        ...

    def held_out(self) -> Sequence[Problem]:
        """Problems that `problem` never returns."""
        ...
