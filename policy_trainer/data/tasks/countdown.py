"""Countdown: reach a target with arithmetic on a few numbers, using each once. Generated, or read from a dataset.

The prompt is nano-aha-moment's, which follows TinyZero's.
"""

import zlib
from collections.abc import Sequence
from itertools import count, islice
from random import Random
from typing import Any

from policy_trainer.config import CountdownConfig, SourceConfig
from policy_trainer.data.problem import Problem, Task
from policy_trainer.data.rows import Row
from policy_trainer.data.tasks.problem_set import ProblemSet, read_split, user_message
from policy_trainer.rewards import Sample
from policy_trainer.rewards.recipes import nano_aha_equation
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
# These rewards add the opening tag, which is in the prefill and therefore not in the completion.
DEFAULT_REWARDS = ("nano_aha/format", "nano_aha/equation")

# The numbers and the target.
Drawn = tuple[tuple[int, ...], int]

EVAL_PROBLEMS = 1000
# Held-out problems are picked from this many draws. Small settings give fewer than EVAL_PROBLEMS different ones.
_EVAL_DRAWS = 20_000
_EVAL_SEED = 20_260
# One in this many problems is held out, in every run.
_EVAL_EVERY = 10


def countdown(source: SourceConfig, seed: int) -> Task:
    """Problems of a file or dataset with columns nums and target; generated ones if the source names neither."""
    if source.path or source.dataset:
        split = read_split(source, _read, ((NUMBERS,), (TARGET,)))
        return ProblemSet("countdown", split, correct, seed, DEFAULT_REWARDS, shuffle=source.shuffle)
    return GeneratedCountdown(source.countdown, seed)


def correct(problem: Problem, completion: str) -> float:
    """1 for an expression that uses each number once and reaches the target, else 0."""
    return nano_aha_equation(Sample(problem, completion))


class GeneratedCountdown:
    """Generated problems; each has a solution.

    Up to 1,000 problems are held out, the same for every seed. None of them is trained on, whatever the order of its
    numbers.
    """

    name = "countdown"
    correct = staticmethod(correct)
    default_rewards = DEFAULT_REWARDS

    def __init__(self, config: CountdownConfig, seed: int) -> None:
        """Raises UserError if the settings make too few problems."""
        self._config = config
        self._seed = seed
        rng = Random(_EVAL_SEED)
        drawn = [problem for _ in range(_EVAL_DRAWS) if (problem := self._draw(rng)) is not None]
        eval_problems = {_key(problem): problem for problem in drawn if _is_eval(problem)}
        self._eval = list(islice(eval_problems.values(), EVAL_PROBLEMS))
        if not eval_problems or all(map(_is_eval, drawn)):
            raise UserError(
                "data.countdown: makes too few problems", "use more numbers, a higher largest, or more operators"
            )

    def problem(self, index: int) -> Problem:
        rng = Random(f"{self._seed} {index}")  # a text seed uses all its characters
        draws = (self._draw(rng) for _ in count())
        return _problem(*next(problem for problem in draws if problem is not None and not _is_eval(problem)))

    def eval_problems(self) -> Sequence[Problem]:
        return [_problem(*drawn) for drawn in self._eval]

    def _draw(self, rng: Random) -> Drawn | None:
        """Draws numbers and combines them at random into a target. None if that is below 1 or not a whole number."""
        numbers = tuple(rng.randint(1, self._config.largest) for _ in range(self._config.numbers))
        values: list[int] = list(numbers)
        while len(values) > 1:
            first, second = (values.pop(rng.randrange(len(values))) for _ in range(2))
            value = _combined(first, second, rng.choice(self._config.operators))
            if value is None:
                return None
            values.append(value)
        return (numbers, values[0]) if values[0] >= 1 else None


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
        messages=user_message(QUESTION.format(numbers=list(numbers), target=target)),
        extras={"numbers": tuple(numbers), "target": target},
        system_prompt=SYSTEM_PROMPT,
        assistant_prefill=ASSISTANT_PREFILL,
    )


def _combined(first: int, second: int, operator: str) -> int | None:
    """The larger number goes first, so that no value is negative. None for a division with a remainder."""
    small, large = sorted((first, second))
    if operator == "/":
        return large // small if small and large % small == 0 else None
    return {"+": large + small, "-": large - small, "*": large * small}[operator]


def _key(drawn: Drawn) -> Drawn:
    """The problem with its numbers sorted: the same for every order of the numbers."""
    numbers, target = drawn
    return tuple(sorted(numbers)), target


def _is_eval(drawn: Drawn) -> bool:
    """Whether the problem is held out: decided by a hash of the problem, so that every process decides the same."""
    return zlib.crc32(repr(_key(drawn)).encode()) % _EVAL_EVERY == 0
