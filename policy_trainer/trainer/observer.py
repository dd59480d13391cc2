"""What the caller of `train` sees of a run while it happens, and what it may ask of the trainer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policy_trainer.config import TrainConfig
from policy_trainer.processes.lifecycle.timing import Stopwatch

if TYPE_CHECKING:  # a program that only makes a run's settings needs no PyTorch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from policy_trainer.reporting.samples import SampledGroup
    from policy_trainer.trainer.evaluation.results import Evaluation

Metrics = dict[str, Any]
# Returns the groups of a step as they were sampled, with rewards and advantages.
Groups = Callable[[], "list[SampledGroup]"]


@dataclass
class Requested:
    """What an observer asks of the trainer. save and evaluate: after this step, even if it is not due; the trainer
    resets them. stop: end the run with a checkpoint."""

    save: bool = False
    evaluate: bool = False
    stop: bool = False


@dataclass(frozen=True)
class RunStart:
    """A run, or its continuation. form: in which log-probs are computed, such as `packed`. step: steps done. past: all
    records of metrics.jsonl."""

    config: TrainConfig
    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    form: str
    step: int
    past: Sequence[Metrics]


class Observer:
    """This one only measures: its methods do nothing. stopwatch: gets the seconds of the trainer's stages.

    must_train: whether a run that has trained no token fails; otherwise this is only printed.
    """

    must_train = True

    def __init__(self, stopwatch: Stopwatch | None = None) -> None:
        self.stopwatch = stopwatch or Stopwatch()
        self.requested = Requested()

    def begin(self, run: RunStart) -> None:
        """Before the first evaluation. What an earlier run was asked is forgotten."""
        self.requested = Requested()

    def begin_step(self) -> None:
        """Before the trainer waits for the batches of a step."""

    def end_step(self, record: Metrics, groups: Groups) -> None:
        """After an update, with the step's metrics."""

    def figures(self, evaluation: "Evaluation") -> Metrics:
        """Further figures of an evaluation, for its record in metrics.jsonl."""
        return {}

    def evaluated(self, record: Metrics, *, best: bool) -> None:
        """After an evaluation. best: whether its scores are the highest so far."""

    def saved(self, checkpoint: Path) -> None:
        """After a checkpoint was written."""

    def end(self) -> None:
        """After the last step, or when the run stops early; not after an error."""
