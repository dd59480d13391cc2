"""What a run from Python returns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from policy_trainer.config import TrainConfig
from policy_trainer.reporting.metrics import Metrics, read_metrics
from policy_trainer.run_files.checkpoint import Checkpoints
from policy_trainer.run_files.run_directory import RunDirectory


@dataclass(frozen=True)
class GRPOResult:
    """How a run ended.

    finished: False if it was interrupted. steps: those done, in all processes of the run. model: directory of the
    trained model, or of the newest checkpoint of an interrupted run; both load as Hugging Face models. None if there is
    none. best_model: the checkpoint of the best evaluation, None if that was the one before training. history:
    metrics of each step. evaluations: those of each evaluation.
    """

    finished: bool
    steps: int
    run_dir: Path
    model: str | None = None
    best_model: str | None = None
    history: list[Metrics] = field(default_factory=list, repr=False)
    evaluations: list[Metrics] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        if self.finished:
            return f"{self.steps} steps; the model is in {self.model}"
        return f"stopped after {self.steps} steps; the same call with resume=True goes on"


def read_result(config: TrainConfig, *, finished: bool, steps: int, best_step: int | None) -> GRPOResult:
    """The result, with what the run's directory holds."""
    directory = RunDirectory(config.run_dir)
    checkpoints = Checkpoints(directory.checkpoints, keep=config.checkpoint.save_total_limit)
    model = directory.model if finished else checkpoints.newest()
    best = None if best_step is None else checkpoints.of_step(best_step)
    records = read_metrics(directory.metrics)
    return GRPOResult(
        finished=finished,
        steps=steps,
        run_dir=directory.root,
        model=str(model) if model else None,
        best_model=str(best) if best else None,
        history=_of_kind("step", records),
        evaluations=_of_kind("evaluation", records),
    )


def _of_kind(kind: str, records: Sequence[Metrics]) -> list[Metrics]:
    return [record for record in records if record["kind"] == kind]
