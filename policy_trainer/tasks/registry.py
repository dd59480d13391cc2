"""Tasks by name."""

from collections.abc import Callable, Mapping

from policy_trainer.config import CommonConfig, SourceConfig
from policy_trainer.data.problem import Task
from policy_trainer.data.steps import JudgesSteps
from policy_trainer.rewards.registry import needs_answers
from policy_trainer.tasks.arithmetic import Arithmetic
from policy_trainer.tasks.asking import asking
from policy_trainer.tasks.countdown import countdown
from policy_trainer.tasks.dataset import dataset
from policy_trainer.tasks.gsm8k import gsm8k
from policy_trainer.tasks.jsonl import jsonl
from policy_trainer.tasks.math import math
from policy_trainer.tasks.mixture import Mixture, StepMixture
from policy_trainer.tasks.own_rows import OPTIONAL, REQUIRED, Answers
from policy_trainer.tasks.user_task import user_task
from shared.errors import UserError

TASKS: Mapping[str, Callable[[SourceConfig, int], Task]] = {
    "arithmetic": lambda source, seed: Arithmetic(seed),
    "countdown": countdown,
    "gsm8k": gsm8k,
    "math": math,
}
# Tasks of the user's own rows, which may lack gold answers that no reward needs.
OWN_ROWS: Mapping[str, Callable[[SourceConfig, int, Answers], Task]] = {"dataset": dataset, "jsonl": jsonl}


def make_task(config: CommonConfig) -> Task:
    """The task that the configuration names.

    Raises UserError for data that cannot be used, and for a task that does not judge steps if judging.steps is set.
    """
    task = _make(config)
    if config.judging.steps and not isinstance(task, JudgesSteps):
        raise UserError(
            f"judging.steps: task {task.name} does not judge steps; arithmetic does, your own can (docs/tasks.md)"
        )
    return task


def _make(config: CommonConfig) -> Task:
    if config.task != "mixture":
        return _make_one(config.task, config.data, config)
    sources = config.data.mixture
    tasks = [_make_one(source.task, source, config) for source in sources]
    kind = StepMixture if all(isinstance(task, JudgesSteps) for task in tasks) else Mixture
    return kind(tasks, [source.weight for source in sources], config.seed)


def _make_one(name: str, source: SourceConfig, config: CommonConfig) -> Task:
    if ":" in name:
        return user_task(name, source, config.seed)
    if name in OWN_ROWS:
        answers = REQUIRED if needs_answers(config.rewards) else OPTIONAL
        return asking(OWN_ROWS[name](source, config.seed, answers), config)
    return TASKS[name](source, config.seed)
