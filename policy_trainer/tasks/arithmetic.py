"""Addition of two numbers from 0 to 99, generated: `a+b=?`. 1,000 of the 10,000 ordered pairs are held out."""

from collections.abc import Sequence

import numpy as np

from policy_trainer.rewards import equal_text
from policy_trainer.tasks.interface import Problem
from policy_trainer.tasks.shuffle import Shuffle

NUMBERS = 100
HELD_OUT = 1000
# The split does not depend on the seed of a run, so that a base model's warm-up and every run hold out the same pairs.
_SPLIT_SEED = 20_260


class Arithmetic:
    name = "arithmetic"
    compare = staticmethod(equal_text)
    default_rewards = ("accuracy", "tags")

    def __init__(self, seed: int) -> None:
        order = np.random.default_rng(_SPLIT_SEED).permutation(NUMBERS * NUMBERS)
        self._held_out, self._train = order[:HELD_OUT], order[HELD_OUT:]
        self._shuffle = Shuffle(len(self._train), seed)

    def problem(self, index: int) -> Problem:
        """Passes over the training pairs, each in an order of its own."""
        return _problem(int(self._train[self._shuffle.place(index)]))

    def held_out(self) -> Sequence[Problem]:
        return [_problem(int(pair)) for pair in self._held_out]


def _problem(pair: int) -> Problem:
    a, b = divmod(pair, NUMBERS)
    return Problem(answer=str(a + b), messages=({"role": "user", "content": f"{a}+{b}=?"},))
