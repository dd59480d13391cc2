"""What a task is: problems by index, a set that is never trained on, and a judge."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from policy_trainer.rewards import Comparison

Message = Mapping[str, str]


@dataclass(frozen=True)
class Problem:
    """One prompt and its gold answer. messages go through the model's chat template; prompt is taken as it is."""

    answer: str
    messages: tuple[Message, ...] = ()
    prompt: str = ""
    # What judging wants besides the gold answer, such as the numbers of a countdown.
    extras: Mapping[str, Any] = field(default_factory=dict)


class Task(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def compare(self) -> Comparison:
        """Whether an answer is right, 1 or 0; NaN when the gold answer cannot be judged."""
        ...

    @property
    def default_rewards(self) -> tuple[str, ...]:
        """Names of the rewards that are taken when the configuration names none."""
        ...

    def problem(self, index: int) -> Problem:
        """The training problem of this index: a pure function of the task's seed and the index."""
        ...

    def held_out(self) -> Sequence[Problem]:
        """Problems that `problem` never returns."""
        ...
