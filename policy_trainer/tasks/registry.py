"""Tasks by name."""

from collections.abc import Callable, Mapping

from policy_trainer.config import CommonConfig
from policy_trainer.rewards import COMPARISONS
from policy_trainer.tasks.arithmetic import Arithmetic
from policy_trainer.tasks.interface import Task
from policy_trainer.tasks.jsonl import Jsonl


def _jsonl(config: CommonConfig) -> Task:
    assert config.data.path is not None, "the configuration refuses jsonl without a path"
    return Jsonl(config.data.path, config.data.held_out_path, COMPARISONS[config.data.answer_rule], config.seed)


TASKS: Mapping[str, Callable[[CommonConfig], Task]] = {
    "arithmetic": lambda config: Arithmetic(config.seed),
    "jsonl": _jsonl,
}


def make_task(config: CommonConfig) -> Task:
    """The task that the configuration names. Raises Refused for data that cannot be used."""
    return TASKS[config.task](config)
