"""What a trainer works with: where batches come from, the workers, where reports go; and the record of a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from policy_trainer.algorithms.objective.group import Group
from policy_trainer.algorithms.objective.kl import teacher_kl
from policy_trainer.config import ENV_PREFIX, TrainConfig
from policy_trainer.learner.step_stats import StepStats
from policy_trainer.processes.children import Child, RestartedChild
from policy_trainer.processes.fork_server import ForkServer
from policy_trainer.reporting.conversations import rollout_metrics
from policy_trainer.reporting.display import Display
from policy_trainer.reporting.first_steps import FirstSteps
from policy_trainer.reporting.health import Health, health_record
from policy_trainer.reporting.logged import logged_metrics
from policy_trainer.reporting.metrics import Metrics, batch_metrics
from policy_trainer.reporting.reward_failures import RewardFailures
from policy_trainer.reporting.samples import Samples
from policy_trainer.reporting.tracking import Recorder
from policy_trainer.run_files import recording
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trainer.evaluation.results import Evaluation, sampled_groups
from policy_trainer.trainer.observer import Observer
from policy_trainer.trainer.queue_client.feed import LeaseFeed
from policy_trainer.trainer.queue_client.server import KeptSamples, QueueWatch, token_of
from policy_trainer.weights.published.publisher import BackgroundPublisher
from policy_trainer.weights.reference.renewal import Renewal
from shared.batch import Batch
from shared.client import Leased
from shared.devices import choose_device


class Workers:
    """The rollout workers: one that the trainer starts and restarts, or others that the user does.

    process: the trainer's; None if it starts none. command: what starts one then; for messages.
    """

    def __init__(self, process: RestartedChild | None, command: str = "") -> None:
        self._command = command
        self._process = process

    def start(self) -> None:
        """Unless it is started already."""
        if self._process is not None and not self._process.pid:
            self._process.start()

    def check(self) -> None:
        """Restarts the trainer's worker if it has died, after a pause. Raises RunFailed if that does not help."""
        if self._process is not None:
            self._process.check()

    def delivered(self) -> None:
        """Call it when batches have arrived."""
        if self._process is not None:
            self._process.succeeded()

    def describe(self) -> str:
        """What the trainer waits for."""
        if self._process is None:
            return f"no rollout worker delivers; start one with `{self._command}`"
        return f"the rollout worker (process {self._process.pid}) starts, or samples and judges completions"

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


def choose_workers(
    config: TrainConfig,
    server: str,
    directory: RunDirectory,
    note: Callable[[str], None],
    forks: ForkServer | None = None,
) -> Workers:
    """server: its URL. forks: starts a worker that samples with PyTorch."""
    command = ["rollout", "--config", str(directory.config)]
    if config.rollout == "external":
        if config.weights == "server":
            command = ["rollout", "--server", server, "--run", config.run]
        return Workers(None, f"policy-trainer {' '.join(command)}")
    command += ["--server", server, *([] if config.threads is None else ["--threads", str(config.threads)])]
    token = token_of(config)
    secret = {f"{ENV_PREFIX}TOKEN": token} if token else {}  # not an argument: everyone can read command lines
    forks = forks if config.sampler_traits.can_fork else None
    child = Child("rollout worker", "policy_trainer", command, directory.logs / "rollout.log", secret, (), forks)
    return Workers(RestartedChild(child, note, futile=" without delivering a batch in between"))


def cpu_threads(config: TrainConfig, *, ranks: int = 1) -> int | None:
    """PyTorch threads of the trainer, its worker and its reference server; None for PyTorch's choice, all cores.

    By default half of the cores where a worker samples while the trainer trains, on one CPU: with more threads than
    cores, those that have a core wait for those that have none, and a run took 1.6 times as long.
    """
    shared = config.rollout == "inline" and config.max_lag != 0 and ranks == 1
    if config.threads or not shared or choose_device(config.device).type != "cpu":
        return config.threads
    return max(1, torch.get_num_threads() // 2)


# By default workers pause when the groups of this many steps wait for training.
_WAITING_STEPS = 3


def max_waiting(config: TrainConfig) -> int:
    """How many groups may wait for training: by default at most max_lag + 1 steps of them, since more would expire."""
    steps = _WAITING_STEPS if config.max_lag is None else min(_WAITING_STEPS, config.max_lag + 1)
    return config.max_waiting or steps * config.groups_per_step


@dataclass(frozen=True)
class BatchSource:
    """The source of batches.

    samples: sends sampled groups to the server, if it keeps any. weights: where the workers get theirs. check_first_kl:
    see matching.check_first_kl. renewal: of the reference; None if it stays the same.
    """

    feed: LeaseFeed
    watch: QueueWatch
    samples: KeptSamples | None
    workers: Workers
    weights: BackgroundPublisher
    check_first_kl: Callable[[float, float], str | None]
    renewal: Renewal | None = None


@dataclass(frozen=True)
class Reporters:
    """Reports a run to files, trackers, the terminal and the caller, with health warnings.

    recording: directory for the batches of each step, if they are kept. past: all records of earlier processes.
    """

    metrics: Recorder
    samples: Samples
    health: Health
    first_steps: FirstSteps
    display: Display
    reward_failures: RewardFailures
    recording: Path | None = None
    observer: Observer = field(default_factory=Observer)
    past: Sequence[Metrics] = ()

    @property
    def evaluated(self) -> Mapping[str, Any]:
        """The metrics of the latest evaluation of an earlier process; empty if there was none."""
        return next((record for record in reversed(self.past) if record["kind"] == "evaluation"), {})

    def step(self, record: Metrics, batches: Sequence[Batch], groups: Sequence[Group]) -> None:
        """Reports a training step, and new health warnings."""
        self.metrics.write(record)
        self.display.step(record)
        for sentence in self.reward_failures.observe(batches):
            self.display.note(f"step {record['step']}: {sentence}")
        for trouble in (*self.first_steps.observe(record["step"], batches), *self.health.observe(record)):
            self.metrics.write(health_record(trouble, record["step"]))
            self.display.note(f"step {record['step']}: {trouble}")
        self.observer.end_step(dict(record), partial(self.samples.groups, record["step"], batches, groups))

    def evaluation(self, evaluation: Evaluation, step: int, progress: Metrics, *, best: bool) -> None:
        """Reports an evaluation. step: training steps done. progress: the completions and seconds until then."""
        more = self.observer.figures(evaluation)
        record = {"step": step, **evaluation.summary(), **progress, **more}
        self.samples.of_evaluation(sampled_groups(evaluation, step))
        self.metrics.write({"kind": "evaluation", **record})
        for line in (f"held-out {evaluation}", *evaluation.failures):
            self.display.note(f"step {step}{'' if step else ', before training'}: {line}")
        self.observer.evaluated(record, best=best)

    def keep(self, step: int, batches: Sequence[Batch]) -> None:
        """Writes the batches of a step, if they are kept for a replay."""
        if self.recording is not None:
            recording.record(self.recording, step, batches)


def step_record(leased: Sequence[Leased], groups: Sequence[Group], stats: StepStats, step: int) -> dict[str, Any]:
    """step: its number, from 1. groups: one for each batch; those that train have advantages."""
    batches = [lease.batch for lease in leased]
    return {
        "kind": "step",
        "step": step,
        **batch_metrics(leased, version=step - 1),
        **rollout_metrics(batches),
        **logged_metrics(batches),
        **stats.metrics,
        "each_update": stats.each_update,
        "groups": stats.groups,
        "tokens": stats.tokens,
        "updates": stats.updates,
        "not_finite": stats.not_finite,
        "teacher_kl": teacher_kl(groups),
        "batch_ids": [lease.id for lease in leased],
        "groups_left_out": len(leased) - stats.groups,
    }
