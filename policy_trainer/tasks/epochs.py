"""Training steps from epochs: passes over a task's training problems."""

import math
from typing import Protocol, runtime_checkable

from policy_trainer.config import TrainConfig
from policy_trainer.data.problem import Task
from shared.errors import UserError


@runtime_checkable
class Finite(Protocol):
    """A task whose training problems repeat after a pass."""

    @property
    def training_problems(self) -> int:
        """How many problems one pass has."""
        ...


def steps_of_epochs(config: TrainConfig, task: Task) -> int:
    """Steps that draw num_train_epochs passes, rounded up to a whole step.

    Raises UserError for a task without an end: num_train_epochs must be set.
    """
    assert config.num_train_epochs is not None
    if not isinstance(task, Finite):
        raise UserError(
            f"num_train_epochs: task {task.name} has no passes ({_REASONS.get(task.name, _OWN)}): "
            "give --max-steps instead"
        )
    return math.ceil(config.num_train_epochs * task.training_problems / config.groups_per_step)


_REASONS = {
    "countdown": "its problems are generated without end",
    "mixture": "its tasks are of different sizes and end at different times",
}
_OWN = "it has no attribute training_problems, the number of them"
