"""The task `environment`: its problems are those that the environment shows at its reset, and rewards at the end."""

import math
from collections.abc import Sequence

from policy_trainer.config import ENVIRONMENT
from policy_trainer.data.problem import Problem
from policy_trainer.data.tasks.problem_set import user_message

EVAL_PROBLEMS = 1000
_NO_PROBLEM = Problem(answer="", messages=user_message(""))


class EnvironmentTask:
    name = ENVIRONMENT
    default_rewards = (ENVIRONMENT,)

    def problem(self, index: int) -> Problem:
        """Nothing: the environment appends its text. Its random numbers follow from the run's seed and the index."""
        return _NO_PROBLEM

    def eval_problems(self) -> Sequence[Problem]:
        return [_NO_PROBLEM] * EVAL_PROBLEMS

    @staticmethod
    def correct(problem: Problem, completion: str) -> float:
        return math.nan
