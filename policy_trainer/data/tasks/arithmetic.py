"""Addition of two numbers from 0 to 99, generated: `a+b=?`. 1,000 of the 10,000 ordered pairs are held out.

The steps that it judges are the equations of column addition, and the answer.
"""

from collections.abc import Callable, Sequence

import numpy as np

from policy_trainer.data.problem import Problem
from policy_trainer.data.steps import Step
from policy_trainer.data.tasks.problem_set import Shuffle
from policy_trainer.rewards import equal_text, parse_answer
from policy_trainer.rewards.answers import ByAnswer

NUMBERS = 100
EVAL_PROBLEMS = 1000
# The split does not depend on the seed of a run, so that a base model's warm-up and every run hold out the same pairs.
_SPLIT_SEED = 20_260
# Maximum equations that are judged in a completion: a completion of commas would have a step for each of them.
_MAX_STEPS = 16


class Pairs:
    """One problem for each ordered pair of numbers below `numbers`."""

    correct = ByAnswer(equal_text)

    def __init__(self, numbers: int, make: Callable[[int, int], Problem], seed: int) -> None:
        order = np.random.default_rng(_SPLIT_SEED).permutation(numbers * numbers)
        self._eval, self._train = order[:EVAL_PROBLEMS], order[EVAL_PROBLEMS:]
        self._shuffle = Shuffle(len(self._train), seed)
        self._problem = lambda pair: make(*divmod(int(pair), numbers))

    def problem(self, index: int) -> Problem:
        """The training problem at this index: shuffled passes over the training pairs."""
        return self._problem(self._train[self._shuffle.place(index)])

    def eval_problems(self) -> Sequence[Problem]:
        return [self._problem(pair) for pair in self._eval]


class Arithmetic(Pairs):
    name = "arithmetic"
    default_rewards = ("accuracy", "tags")
    training_problems = NUMBERS * NUMBERS - EVAL_PROBLEMS

    def __init__(self, seed: int) -> None:
        super().__init__(NUMBERS, _problem, seed)

    def steps(self, problem: Problem, completion: str) -> Sequence[Step]:
        """1 for each equation equal to column addition's at its place, else 0; then 1 for a correct answer, else 0."""
        expected = work(problem)
        thought, tag, _ = completion.removeprefix("<think>").partition("</think>")
        worked = tag and completion.startswith("<think>")
        written = thought.split(",")[:_MAX_STEPS] if worked else []
        steps, place = [], len("<think>")
        for i, equation in enumerate(written):
            place += len(equation) + 1
            steps.append(Step(place, float(i < len(expected) and equation == expected[i])))
        right = equal_text(parse_answer(completion) or "", problem.answer)
        return [*steps, Step(len(completion), right)]


def work(problem: Problem) -> list[str]:
    """The equations of column addition, ones first: `4+8=12` and `5+5+1=11` for 54+58."""
    a, b = (int(number) for number in problem.messages[0]["content"].removesuffix("=?").split("+"))
    ones = a % 10 + b % 10
    tens = f"{a // 10}+{b // 10}" + ("+1" if ones > 9 else "")
    return [f"{a % 10}+{b % 10}={ones}", f"{tens}={a // 10 + b // 10 + ones // 10}"]


def _problem(a: int, b: int) -> Problem:
    return Problem(answer=str(a + b), messages=({"role": "user", "content": f"{a}+{b}=?"},))
