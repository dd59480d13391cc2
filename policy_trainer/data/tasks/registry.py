"""Tasks by name, a user's own among them, and the steps that passes over their problems take."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

from policy_trainer.config import CommonConfig, SourceConfig, TrainConfig
from policy_trainer.data.problem import Correct, Problem, Task, training_problems
from policy_trainer.data.steps import Step, StepJudge, step_judge
from policy_trainer.data.tasks.arithmetic import Arithmetic
from policy_trainer.data.tasks.countdown import countdown
from policy_trainer.data.tasks.environment import EnvironmentTask
from policy_trainer.data.tasks.math import geometry3k, gsm8k, math
from policy_trainer.data.tasks.mixture import Mixture
from policy_trainer.data.tasks.user_rows import ROW_TASKS, row_task
from policy_trainer.data.user_code import accepts, explained, import_named
from policy_trainer.rewards.answers import ByAnswer
from shared.errors import UserError
from shared.spelling import spell_setting

TASKS: Mapping[str, Callable[[SourceConfig, int], Task]] = {
    "arithmetic": lambda source, seed: Arithmetic(seed),
    "countdown": countdown,
    "environment": lambda source, seed: EnvironmentTask(),
    "geometry3k": geometry3k,
    "gsm8k": gsm8k,
    "math": math,
}
# Why a task has no passes.
_ENDLESS = {
    "countdown": "its problems are generated without end",
    "environment": "the environment has problems without end",
    "mixture": "its tasks are of different sizes and end at different times",
}
# The members that every Task must have.
_MEMBERS = ("name", "correct", "default_rewards", "problem", "eval_problems")
_NO_ATTRIBUTE = "it has no attribute training_problems, the number of them"


def make_task(config: CommonConfig) -> Task:
    """The task that the configuration names.

    Raises UserError for data that cannot be used, and for a task that does not judge steps if judging.steps is set.
    """
    task = _make(config)
    if config.judging.steps and not step_judge(task):
        raise UserError(
            f"judging.steps: task {task.name} does not judge steps; arithmetic does, your own can (docs/tasks.md)"
        )
    return task


def _make(config: CommonConfig) -> Task:
    if config.task != "mixture":
        return _make_one(config.task, config.data, config)
    sources = config.data.mixture
    tasks = [_make_one(source.task, source, config) for source in sources]
    return Mixture(tasks, [source.weight for source in sources], config.seed)


def _make_one(name: str, source: SourceConfig, config: CommonConfig) -> Task:
    if ":" in name:
        return user_task(name, source, config.seed)
    if name in ROW_TASKS:
        return row_task(name, source, config.seed, config.rewards, prompt_needed=not config.environment)
    return TASKS[name](source, config.seed)


def steps_of_epochs(config: TrainConfig, task: Task) -> int:
    """Steps that draw num_train_epochs passes, rounded up to a whole step.

    num_train_epochs must be set. Raises UserError for a task whose problems do not end.
    """
    assert config.num_train_epochs is not None
    if (problems := training_problems(task)) is None:
        raise UserError(
            f"num_train_epochs: task {task.name} has no passes ({_ENDLESS.get(task.name, _NO_ATTRIBUTE)})",
            f"give {spell_setting('max_steps')} instead",
        )
    return ceil(config.num_train_epochs * problems / config.groups_per_step)


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
        self.correct: Correct = task.correct if isinstance(task.correct, ByAnswer) else self._judge
        self.training_problems = training_problems(task)
        self.steps: StepJudge | None = self._judge_steps if step_judge(task) else None

    def problem(self, index: int) -> Problem:
        with explained("task", f"{self._path}.problem({index})"):
            return self._task.problem(index)

    def eval_problems(self) -> Sequence[Problem]:
        with explained("task", f"{self._path}.eval_problems()"):
            return self._task.eval_problems()

    def _judge(self, problem: Problem, completion: str) -> float:
        with explained("task", f"{self._path}.correct(problem, {_short(completion)})"):
            return self._task.correct(problem, completion)

    def _judge_steps(self, problem: Problem, completion: str) -> Sequence[Step]:
        with explained("task", f"{self._path}.steps({_short(completion)})"):
            return self._task.steps(problem, completion)


def _short(completion: str) -> str:
    return repr(completion if len(completion) <= 60 else f"{completion[:60]}…")
