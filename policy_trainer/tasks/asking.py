"""Asks a user's own problems for the form of answer that the rewards look for."""

from collections.abc import Sequence
from dataclasses import replace

from policy_trainer.config import CommonConfig
from policy_trainer.data.problem import Problem, Task
from policy_trainer.rewards.registry import tagged_rewards
from policy_trainer.tasks.epochs import Finite
from policy_trainer.tasks.problem_set import THINK_THEN_ANSWER, LazyProblems

# The rewards that THINK_THEN_ANSWER suits. Published recipes look for forms of their own.
_SUITED = {"accuracy", "format", "tags"}


def asking(task: Task, config: CommonConfig) -> Task:
    """A task of the user's own problems, with a system prompt that asks for answer tags if all rewards that look for
    tags know that form."""
    tagged = tagged_rewards(config, task)
    return Asking(task) if tagged and tagged <= _SUITED else task


class Asking:
    """A task whose problems with messages have the system prompt THINK_THEN_ANSWER. A text that is taken as it stands
    goes without it, see PromptEncoder."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.name = task.name
        self.correct = task.correct
        self.default_rewards = task.default_rewards

    @property
    def training_problems(self) -> int:
        assert isinstance(self._task, Finite)
        return self._task.training_problems

    def problem(self, index: int) -> Problem:
        return _asked(self._task.problem(index))

    def eval_problems(self) -> Sequence[Problem]:
        problems = self._task.eval_problems()
        return LazyProblems(len(problems), lambda place: _asked(problems[place]))


def _asked(problem: Problem) -> Problem:
    return replace(problem, system_prompt=THINK_THEN_ANSWER) if problem.messages else problem
