"""Tasks by name, and the steps that passes over their problems take."""

from collections.abc import Callable, Mapping
from math import ceil

from policy_trainer.config import CommonConfig, SourceConfig, TrainConfig
from policy_trainer.data.problem import Task, training_problems
from policy_trainer.data.steps import step_judge
from policy_trainer.tasks.arithmetic import Arithmetic
from policy_trainer.tasks.countdown import countdown
from policy_trainer.tasks.math import gsm8k, math
from policy_trainer.tasks.mixture import Mixture
from policy_trainer.tasks.user_rows import ROW_TASKS, row_task
from policy_trainer.tasks.user_task import user_task
from shared.errors import UserError

TASKS: Mapping[str, Callable[[SourceConfig, int], Task]] = {
    "arithmetic": lambda source, seed: Arithmetic(seed),
    "countdown": countdown,
    "gsm8k": gsm8k,
    "math": math,
}
# Why a task has no passes.
_ENDLESS = {
    "countdown": "its problems are generated without end",
    "mixture": "its tasks are of different sizes and end at different times",
}
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
        return row_task(name, source, config)
    return TASKS[name](source, config.seed)


def steps_of_epochs(config: TrainConfig, task: Task) -> int:
    """Steps that draw num_train_epochs passes, rounded up to a whole step.

    num_train_epochs must be set. Raises UserError for a task whose problems do not end.
    """
    assert config.num_train_epochs is not None
    if (problems := training_problems(task)) is None:
        raise UserError(
            f"num_train_epochs: task {task.name} has no passes ({_ENDLESS.get(task.name, _NO_ATTRIBUTE)}): "
            "give --max-steps instead"
        )
    return ceil(config.num_train_epochs * problems / config.groups_per_step)
