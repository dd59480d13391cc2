"""The objects that a trainer uses, where batches come from and where reports go, and the record of a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from policy_trainer.learner.step_stats import StepStats
from policy_trainer.lifecycle.timing import Stopwatch
from policy_trainer.objective.group import Group
from policy_trainer.objective.kl import teacher_kl
from policy_trainer.queue_client.feed import LeaseFeed
from policy_trainer.queue_client.ledger import Ledger
from policy_trainer.queue_client.server import KeptSamples, QueueWatch
from policy_trainer.reference.renewal import Renewal
from policy_trainer.reporting.display import Display
from policy_trainer.reporting.first_steps import FirstSteps
from policy_trainer.reporting.health import Health, health_record
from policy_trainer.reporting.metrics import batch_metrics
from policy_trainer.reporting.reward_failures import RewardFailures
from policy_trainer.reporting.samples import Samples
from policy_trainer.reporting.tracking import Recorder
from policy_trainer.run_files.recording import Recording
from policy_trainer.trainer.workers import Workers
from policy_trainer.weights.publisher import BackgroundPublisher
from shared.batch import RolloutBatch
from shared.client import Leased


@dataclass(frozen=True)
class BatchSource:
    """The source of batches. ledger: leased batches, and trained ones that are not acked; the feed updates it.

    samples: sends sampled groups to the server, if it keeps any. weights: where the workers get theirs. check_first_kl:
    see matching.check_first_kl. renewal: of the reference; None if it stays the same.
    """

    feed: LeaseFeed
    ledger: Ledger
    watch: QueueWatch
    samples: KeptSamples | None
    workers: Workers
    weights: BackgroundPublisher
    check_first_kl: Callable[[float, float], str | None]
    renewal: Renewal | None = None


@dataclass(frozen=True)
class Reporters:
    """Reports a run to files, trackers and the terminal, with health warnings.

    evaluated: the metrics of the latest evaluation of an earlier process; empty if there was none.
    """

    metrics: Recorder
    samples: Samples
    health: Health
    first_steps: FirstSteps
    display: Display
    reward_failures: RewardFailures
    recording: Recording | None = None
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    evaluated: Mapping[str, Any] = field(default_factory=dict)

    def step(self, record: Mapping[str, Any], batches: Sequence[RolloutBatch]) -> None:
        """Reports a training step, and new health warnings."""
        self.metrics.write(record)
        self.display.step(record)
        for sentence in self.reward_failures.observe(batches):
            self.display.note(f"step {record['step']}: {sentence}")
        for trouble in (*self.first_steps.observe(record["step"], batches), *self.health.observe(record)):
            self.metrics.write(health_record(trouble, record["step"]))
            self.display.note(f"step {record['step']}: {trouble}")


def step_record(leased: Sequence[Leased], groups: Sequence[Group], stats: StepStats, step: int) -> dict[str, Any]:
    """step: its number, from 1. groups: of the batches that train."""
    return {
        "kind": "step",
        "step": step,
        **batch_metrics(leased, version=step - 1),
        **asdict(stats),
        "teacher_kl": teacher_kl(groups),
        "batch_ids": [lease.id for lease in leased],
        "groups_left_out": len(leased) - stats.groups,
    }
