"""The demo with a tool: products of two numbers, too hard for a tiny model, easy with the tool `multiply`."""

import random
from collections.abc import Sequence

import numpy as np

from policy_trainer.config import SourceConfig
from policy_trainer.data.problem import Problem
from policy_trainer.rewards import equal_text
from policy_trainer.rewards.answers import ByAnswer
from policy_trainer.tasks.problem_set import Shuffle

SMALLEST, LARGEST = 10, 99
_NUMBERS = LARGEST - SMALLEST + 1
EVAL_PROBLEMS = 1000
# As in the task `arithmetic`: every run holds out the same pairs.
_SPLIT_SEED = 20_260

# As a value of the setting `task`, and of `tools`.
PRODUCTS, MULTIPLY = f"{__name__}:products", f"{__name__}:multiply"


def multiply(a: int, b: int) -> int:
    """
    Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The product.
    """
    return a * b


class Products:
    name = "products"
    correct = ByAnswer(equal_text)
    default_rewards = ("accuracy",)
    training_problems = _NUMBERS * _NUMBERS - EVAL_PROBLEMS

    def __init__(self, seed: int) -> None:
        order = np.random.default_rng(_SPLIT_SEED).permutation(_NUMBERS * _NUMBERS)
        self._eval, self._train = order[:EVAL_PROBLEMS], order[EVAL_PROBLEMS:]
        self._shuffle = Shuffle(len(self._train), seed)

    def problem(self, index: int) -> Problem:
        return _problem(int(self._train[self._shuffle.place(index)]))

    def eval_problems(self) -> Sequence[Problem]:
        return [_problem(int(pair)) for pair in self._eval]


def products(source: SourceConfig, seed: int) -> Products:
    return Products(seed)


def factors(problem: Problem) -> tuple[int, int]:
    a, b = problem.messages[0]["content"].removesuffix("=?").split("*")
    return int(a), int(b)


def guess(problem: Problem, chance: random.Random) -> int:
    """A number of the product's size."""
    a, b = factors(problem)
    return a * b + chance.randint(1, 99) * chance.choice((-1, 1))


def _problem(pair: int) -> Problem:
    a, b = (SMALLEST + number for number in divmod(pair, _NUMBERS))
    return Problem(answer=str(a * b), messages=({"role": "user", "content": f"{a}*{b}=?"},))
