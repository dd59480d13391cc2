"""Trains from recorded batches: no server, no sampler, the same steps each time."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from rich.console import Console

from policy_trainer.config import ReplayConfig, TrainConfig
from policy_trainer.learner.groups import Batch, PartWeights, rollout_of
from policy_trainer.learner.interface import PolicyLearner
from policy_trainer.lifecycle.endings import RunFailed, StopRequest, write_failures
from policy_trainer.objective.group import Group
from policy_trainer.queue_client.terms import BatchCheck
from policy_trainer.reporting.metrics import MetricsFile
from policy_trainer.rewards.registry import part_weights
from policy_trainer.run_files.recording import read_recording
from policy_trainer.run_files.run_directory import REPLAY, RunDirectory
from policy_trainer.tasks.registry import make_task
from policy_trainer.trainer.parts import step_record
from policy_trainer.trainer.policy import load_in_one_process
from policy_trainer.trainer.run import TrainResult, count_steps
from shared.atomic_files import whole_directory
from shared.client import Leased
from shared.errors import UserError
from shared.models import load_tokenizer, use_threads


def replay(config: ReplayConfig, console: Console) -> TrainResult:
    """Trains until the recording or max_steps ends, or to a request to stop. RUN_DIR/model then has the weights.

    Raises UserError for settings or batches that cannot be used, RunFailed where no token trained or the disk is full.
    """
    use_threads(config.threads)
    recorded = read_recording(config.batches, config.groups_per_step)
    counted = count_steps(config, cache(partial(make_task, config)), console)
    directory = RunDirectory(config.run_dir)
    with directory.hold():
        return _replay(config, counted, recorded, directory, console)


def _replay(
    config: ReplayConfig,
    counted: TrainConfig,
    recorded: Iterator[tuple[int, list[Batch]]],
    directory: RunDirectory,
    console: Console,
) -> TrainResult:
    directory.refuse_trained(REPLAY)
    directory.open(config, console, resume=False)
    tokenizer, weights = load_tokenizer(config.model, revision=config.revision), _part_weights(config)
    loaded = load_in_one_process(counted, config.model, config.revision, None, tokenizer, weights)
    check = BatchCheck.of(loaded.learner.model, counted, weights)
    metrics = MetricsFile(directory.metrics)
    run = Replay(loaded.learner, check, metrics, console)
    try:
        with StopRequest() as stop:
            for step, batches in recorded:
                if stop or step > counted.max_steps:
                    break
                run.train(step, batches)
    finally:
        metrics.close()
    _save(loaded.save, directory.model)
    return run.result(finished=not stop)


class Replay:
    """Trains a learner on recorded steps, and records them as `train` does."""

    def __init__(self, learner: PolicyLearner, check: BatchCheck, metrics: MetricsFile, console: Console) -> None:
        self._learner = learner
        self._check = check
        self._metrics = metrics
        self._console = console
        self._steps = self._batches = self._tokens = 0
        self._seconds = 0.0

    def train(self, step: int, batches: Sequence[Batch]) -> None:
        """step: its number, from 1. Raises UserError for a batch that these settings cannot train on."""
        for batch in batches:
            if reason := self._check.refusal(batch):
                raise UserError(
                    f"batches: {rollout_of(batch).id} of step {step} cannot be trained on: {reason}; give the settings "
                    "and the model of the run that recorded it, or settings that need less (--loss.beta 0)"
                )
        began, groups = time.monotonic(), list[Group]()
        stats = self._learner.step(batches, step=step - 1, on_groups=groups.extend)
        seconds = time.monotonic() - began
        leased = [Leased(batch, rollout_of(batch).id, "", 1) for batch in batches]
        record = step_record(leased, groups, stats, step)
        self._metrics.write({**record, "training_seconds": seconds})
        line = f"step {step}: loss {stats.loss:.4g}, reward {record['reward']:.4g}, grad_norm {stats.grad_norm:.4g}"
        self._console.print(line + (": not finite, so no update was made" if stats.not_finite else ""), highlight=False)
        self._steps, self._batches = step, self._batches + len(batches)
        self._tokens += stats.tokens
        self._seconds += seconds

    def result(self, *, finished: bool) -> TrainResult:
        """Raises RunFailed if no token trained."""
        if finished and not self._tokens:
            raise RunFailed("the replay trained no token: no group had rewards that differ, or none could be judged")
        return TrainResult(finished, self._steps, self._seconds, self._batches, None)


def _part_weights(config: ReplayConfig) -> PartWeights:
    """Weights of the rewards, which only gdpo needs: without it the task's data need not be there."""
    return part_weights(config, make_task(config)) if config.loss.advantage == "gdpo" else {}


def _save(save: Callable[[Path], None], target: Path) -> None:
    with write_failures(target, "make room, and replay again"), whole_directory(target) as directory:
        save(directory)
