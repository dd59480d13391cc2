"""The demo with a tool: products of two numbers, too hard for a tiny model, easy with the tool `multiply`."""

import random

from policy_trainer.config import SourceConfig
from policy_trainer.data.problem import Problem
from policy_trainer.data.tasks.arithmetic import EVAL_PROBLEMS, Pairs

SMALLEST, LARGEST = 10, 99
_NUMBERS = LARGEST - SMALLEST + 1

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


class Products(Pairs):
    name = "products"
    default_rewards = ("accuracy",)
    training_problems = _NUMBERS * _NUMBERS - EVAL_PROBLEMS

    def __init__(self, seed: int) -> None:
        super().__init__(_NUMBERS, _problem, seed)


def products(source: SourceConfig, seed: int) -> Products:
    return Products(seed)


def factors(problem: Problem) -> tuple[int, int]:
    a, b = problem.messages[0]["content"].removesuffix("=?").split("*")
    return int(a), int(b)


def guess(problem: Problem, chance: random.Random) -> int:
    """A number of the product's size."""
    a, b = factors(problem)
    return a * b + chance.randint(1, 99) * chance.choice((-1, 1))


def _problem(first: int, second: int) -> Problem:
    a, b = SMALLEST + first, SMALLEST + second
    return Problem(answer=str(a * b), messages=({"role": "user", "content": f"{a}*{b}=?"},))
