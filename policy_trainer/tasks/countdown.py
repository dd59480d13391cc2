"""Countdown: reach a target with arithmetic on a few numbers, using each once. Generated, or read from a dataset.

The words are nano-aha-moment's, after TinyZero's.
"""

from collections.abc import Sequence
from typing import Any

from policy_trainer.config import SourceConfig
from policy_trainer.data.problem import Problem, Task
from policy_trainer.data.rows import Row
from policy_trainer.rewards import Sample
from policy_trainer.rewards.countdown import nano_aha_equation
from policy_trainer.tasks.countdown_draws import CountdownDraws
from policy_trainer.tasks.problem_set import ProblemSet, read_split
from policy_trainer.tasks.words import asked_by_user
from shared.errors import UserError

NUMBERS, TARGET = "nums", "target"
SYSTEM_PROMPT = (
    "You are a helpful assistant. You first think about the reasoning process in the mind "
    "and then provide the user with the answer."
)
QUESTION = (
    "Using the numbers {numbers}, create an equation that equals {target}. "
    "You can use basic arithmetic operations (+, -, *, /) and each number can only be used once. "
    "Show your work in <think> </think> tags. And return the final equation and answer in "
    "<answer> </answer> tags, for example <answer>(1 + 2) / (3 * 5)</answer>."
)
ASSISTANT_PREFILL = "Let me solve this step by step.\n<think>"
# They put back the opening tag that the prefill has taken from the completion.
DEFAULT_REWARDS = ("nano_aha/format", "nano_aha/equation")


def countdown(source: SourceConfig, seed: int) -> Task:
    """Problems of a file or a dataset with columns nums and target, or generated ones where the source names none."""
    if source.path or source.dataset:
        return ProblemSet(
            "countdown", read_split(source, _read, ((NUMBERS,), (TARGET,))), correct, seed, DEFAULT_REWARDS
        )
    return GeneratedCountdown(CountdownDraws(source.countdown, seed))


def correct(problem: Problem, completion: str) -> float:
    """1 for an expression that uses each number once and reaches the target, else 0."""
    return nano_aha_equation(Sample(problem, completion))


class GeneratedCountdown:
    """Every problem has a solution. What is held out does not depend on the seed of a run."""

    name = "countdown"
    correct = staticmethod(correct)
    default_rewards = DEFAULT_REWARDS

    def __init__(self, draws: CountdownDraws) -> None:
        self._draws = draws

    def problem(self, index: int) -> Problem:
        return _problem(*self._draws.training(index))

    def held_out(self) -> Sequence[Problem]:
        return [_problem(*drawn) for drawn in self._draws.held_out]


def _read(row: Row, where: str) -> Problem:
    numbers, target = row.get(NUMBERS), row.get(TARGET)
    if not isinstance(numbers, list) or not numbers or not all(_is_whole(number) for number in numbers):
        raise UserError(f"{where}: {NUMBERS} must be a list of whole numbers that is not empty")
    if target is None or not _is_whole(target):
        raise UserError(f"{where}: {TARGET} must be a whole number")
    return _problem(tuple(numbers), target)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _problem(numbers: Sequence[int], target: int) -> Problem:
    return Problem(
        answer=str(target),
        messages=asked_by_user(QUESTION.format(numbers=list(numbers), target=target)),
        extras={"numbers": tuple(numbers), "target": target},
        system_prompt=SYSTEM_PROMPT,
        assistant_prefill=ASSISTANT_PREFILL,
    )
