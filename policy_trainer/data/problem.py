"""What a task is: problems by index, a set that is never trained on, and a judge."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = Mapping[str, str]


@dataclass(frozen=True)
class Problem:
    """One prompt and its gold answer. messages go through the model's chat template; prompt is taken as it is."""

    answer: str
    messages: tuple[Message, ...] = ()
    prompt: str = ""
    # What judging wants besides the gold answer, such as the numbers of a countdown.
    extras: Mapping[str, Any] = field(default_factory=dict)
    # The task's own words before the messages and at the beginning of the answer; data.* may say others.
    system_prompt: str = ""
    assistant_prefill: str = ""
    # Which task of a mixture it came from.
    task: str = ""


# (problem, completion) -> 1 when the completion answers the problem rightly, else 0; NaN when the gold answer cannot be
# judged.
Correct = Callable[[Problem, str], float]


class Task(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def correct(self) -> Correct:
        """What accuracy means here, in rewards and in evaluations."""
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
