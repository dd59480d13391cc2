"""A user's own task, named as `module:name`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policy_trainer.config import SourceConfig
from policy_trainer.data.problem import Correct, Problem, Task, training_problems
from policy_trainer.data.steps import Step, StepJudge, step_judge
from policy_trainer.data.user_code import accepts, explained, import_named
from policy_trainer.rewards.answers import ByAnswer
from shared.errors import UserError

# The members that every Task must have.
_MEMBERS = ("name", "correct", "default_rewards", "problem", "eval_problems")


def user_task(name: str, source: SourceConfig, seed: int) -> Task:
    """The task that `name` makes. Its exceptions, now and later, become UserErrors with the user's lines."""
    make = import_named(name, "task")
    if reason := accepts(make, source, seed):
        raise UserError(f"task: {name} cannot be called with (data settings, seed): {reason}")
    with explained("task", f"{name}(data, seed)"):
        task = make(source, seed)
    missing = [member for member in _MEMBERS if not hasattr(task, member)]
    if missing:
        raise UserError(f"task: the result of {name} has no {', '.join(missing)}; docs/tasks.md says what a task needs")
    return UserTask(name, task)


class UserTask:
    """A user's task. Its exceptions become UserErrors that name the call and the user's lines."""

    def __init__(self, path: str, task: Any) -> None:
        self._path = path
        self._task = task
        self.name = task.name
        self.default_rewards = task.default_rewards
        # ByAnswer stays visible as such, since math-verify must run in the sandbox.
        self.correct: Correct = task.correct if isinstance(task.correct, ByAnswer) else _Correct(path, task.correct)
        self.training_problems = training_problems(task)
        self.steps: StepJudge | None = self._judge_steps if step_judge(task) else None

    def problem(self, index: int) -> Problem:
        with explained("task", f"{self._path}.problem({index})"):
            return self._task.problem(index)

    def eval_problems(self) -> Sequence[Problem]:
        with explained("task", f"{self._path}.eval_problems()"):
            return self._task.eval_problems()

    def _judge_steps(self, problem: Problem, completion: str) -> Sequence[Step]:
        with explained("task", f"{self._path}.steps({_short(completion)})"):
            return self._task.steps(problem, completion)


@dataclass(frozen=True)
class _Correct:
    path: str
    correct: Correct

    def __call__(self, problem: Problem, completion: str) -> float:
        with explained("task", f"{self.path}.correct(problem, {_short(completion)})"):
            return self.correct(problem, completion)


def _short(completion: str) -> str:
    return repr(completion if len(completion) <= 60 else f"{completion[:60]}…")
