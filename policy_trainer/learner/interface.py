"""What a trainer needs of a learner, wherever the weights are."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from policy_trainer.algorithms.objective.entropy import EntropyBonus
from policy_trainer.algorithms.objective.group import Group
from policy_trainer.data.completion import Probe
from policy_trainer.learner.step_stats import StepStats
from policy_trainer.rollout.sampling.sampler import Sampler
from shared.batch import Array, Batch


class PolicyLearner(Protocol):
    """model: its configuration; its weights may be elsewhere. The methods are described at `Learner`."""

    model: PreTrainedModel

    @property
    def bonus(self) -> EntropyBonus: ...

    def restore_bonus(self, coef: float, entropy: float) -> None: ...

    def step(
        self, batches: Sequence[Batch], *, step: int, on_groups: Callable[[Sequence[Group]], None] = ...
    ) -> StepStats: ...

    @property
    def updated(self) -> bool: ...

    def failures(self, batches: Sequence[Batch], *, step: int) -> list[Exception | None] | None:
        """As Learner.failures; None if it cannot be determined, because other ranks are in the middle of the step."""
        ...

    def kl(self, batches: Sequence[Batch]) -> float: ...

    def noise_floor(self, batches: Sequence[Batch]) -> float: ...

    def logps(self, batches: Sequence[Batch]) -> list[Array]: ...

    def probe(self, batches: Sequence[Batch]) -> Probe: ...

    def state(self) -> dict[str, Tensor]: ...

    def parameters(self) -> dict[str, Tensor]: ...


WritesWeights = Callable[[Path], Future[Any] | None]
"""Writes weights into a directory. None: they are there. A future: they are on their way to the disk, and its result
raises what went wrong."""


@dataclass(frozen=True, eq=False)
class LoadedLearner:
    """sampler: of the same weights. write: writes them into a directory, with what training needs to go on, or begins
    to. save: writes them as a whole Hugging Face model. form: of the forward, for people."""

    learner: PolicyLearner
    sampler: Sampler
    write: WritesWeights
    save: Callable[[Path], None]
    form: str
