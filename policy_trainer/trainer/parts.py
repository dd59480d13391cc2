"""What a trainer works with, by noun."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy_trainer.queue_client.leases import LeaseFeed
from policy_trainer.queue_client.ledger import Ledger
from policy_trainer.queue_client.queue_watch import QueueWatch
from policy_trainer.reporting.display import Display
from policy_trainer.reporting.health import Health, health_record
from policy_trainer.reporting.tracking import Tracker
from policy_trainer.run_files.checkpoint import Checkpoints, TrainState
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trainer.workers import Workers


@dataclass(frozen=True)
class RunFiles:
    """What lies in the run's directory. resumed_from: the checkpoint that this life goes on from; None for a new run.
    state: where the run stands; it changes as the run goes on."""

    directory: RunDirectory
    checkpoints: Checkpoints
    resumed_from: Path | None
    state: TrainState


@dataclass(frozen=True)
class BatchSource:
    """Where batches come from. ledger: ids of the batches that the weights hold; the feed adds and removes them."""

    feed: LeaseFeed
    ledger: Ledger
    watch: QueueWatch
    workers: Workers


@dataclass(frozen=True)
class Reporters:
    """Who hears of a run: trackers, health warnings, the terminal."""

    metrics: Tracker
    health: Health
    display: Display

    def step(self, record: Mapping[str, Any]) -> None:
        """Reports a training step, and whatever is unhealthy after it."""
        self.metrics.write(record)
        self.display.step(record)
        for trouble in self.health.observe(record):
            self.metrics.write(health_record(trouble, record["step"]))
            self.display.note(f"step {record['step']}: {trouble}")
