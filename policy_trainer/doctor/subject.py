"""What the checks look at. Parts are made when a check first needs them, and later checks use them, too."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import TrainConfig
from policy_trainer.data.problem import Problem, Task
from policy_trainer.reporting.samples import SampledGroup
from policy_trainer.tasks.registry import make_task
from policy_trainer.trainer.dry_run import temporary_run
from shared.api import ModelInfo
from shared.client import RefServerClient
from shared.models import load_outline, load_tokenizer

_DRAWN = 3


@dataclass(frozen=True)
class Served:
    """The server that answered. model: what it scores with. token: sent with each request."""

    client: RefServerClient
    model: ModelInfo
    token: str | None


@dataclass(frozen=True)
class Trained:
    """What the trial of one group left. step: its record of metrics.jsonl. peak_gib: memory of this process."""

    step: Mapping[str, Any]
    group: SampledGroup
    peak_gib: float


class Subject:
    """A run that has not begun. Its parts raise UserError.

    stack: closes what the checks leave open. say: gets what is done just now. served, trained: set by their checks.
    """

    served: Served
    trained: Trained

    def __init__(self, config: TrainConfig, stack: ExitStack, say: Callable[[str], None]) -> None:
        self.config = config
        self.stack = stack
        self.say = say

    @cached_property
    def outline(self) -> PreTrainedModel:
        """The model without its weights."""
        return load_outline(self.config.model, revision=self.config.revision)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.config.model, revision=self.config.revision)

    @cached_property
    def task(self) -> Task:
        return make_task(self.config)

    @cached_property
    def drawn(self) -> list[Problem]:
        return [self.task.problem(index) for index in range(_DRAWN)]

    @cached_property
    def directory(self) -> Path:
        """For all that the checks write, beside RUN_DIR."""
        return self.stack.enter_context(temporary_run(self.config.run_dir, "doctor-"))
