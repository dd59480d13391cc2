"""The objects that a trainer uses: files, batches, reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policy_trainer.lifecycle.endings import RunFailed
from policy_trainer.lifecycle.timing import Stopwatch
from policy_trainer.queue_client.feed import LeaseFeed
from policy_trainer.queue_client.kept_samples import KeepsSamples
from policy_trainer.queue_client.ledger import Ledger
from policy_trainer.queue_client.server import QueueWatch
from policy_trainer.reporting.display import Display
from policy_trainer.reporting.first_steps import FirstSteps
from policy_trainer.reporting.health import Health, health_record
from policy_trainer.reporting.reward_failures import RewardFailures
from policy_trainer.reporting.samples import Samples
from policy_trainer.reporting.tracking import Recorder
from policy_trainer.run_files.checkpoint import Checkpoints, TrainState
from policy_trainer.run_files.recording import NoRecording, Recording
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trainer.workers import Workers
from policy_trainer.weights.publisher import PublishedBeside
from shared.batch import RolloutBatch


@dataclass(frozen=True)
class RunFiles:
    """Files and state of a run.

    resumed_from: the checkpoint that this process resumes from; None for a new run. state: the run's progress; the
    trainer updates it. trial: the server keeps neither metrics nor samples of this run.
    """

    directory: RunDirectory
    checkpoints: Checkpoints
    resumed_from: Path | None
    state: TrainState
    lineage: str = ""
    trial: bool = False

    def check_directory(self) -> None:
        """Raises RunFailed if the directory was deleted, and perhaps begun again, since this trainer opened it."""
        if self.directory.lineage != self.lineage:
            raise RunFailed(
                f"run_dir: {self.directory.root} was deleted or begun again while this trainer was at work.\n"
                "It stops here and writes nothing more; train again to begin a new run"
            )


@dataclass(frozen=True)
class BatchSource:
    """The source of batches. ledger: leased batches, and trained ones that are not acked; the feed updates it.

    samples: tells the server of sampled groups. weights: where the workers get theirs.
    """

    feed: LeaseFeed
    ledger: Ledger
    watch: QueueWatch
    samples: KeepsSamples
    workers: Workers
    weights: PublishedBeside


@dataclass(frozen=True)
class Reporters:
    """Reports a run to files, trackers and the terminal, with health warnings."""

    metrics: Recorder
    samples: Samples
    health: Health
    first_steps: FirstSteps
    display: Display
    reward_failures: RewardFailures
    recording: Recording = field(default_factory=NoRecording)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    def step(self, record: Mapping[str, Any], batches: Sequence[RolloutBatch]) -> None:
        """Reports a training step, and new health warnings."""
        self.metrics.write(record)
        self.display.step(record)
        for sentence in self.reward_failures.observe(batches):
            self.display.note(f"step {record['step']}: {sentence}")
        for trouble in (*self.first_steps.observe(record["step"], batches), *self.health.observe(record)):
            self.metrics.write(health_record(trouble, record["step"]))
            self.display.note(f"step {record['step']}: {trouble}")
