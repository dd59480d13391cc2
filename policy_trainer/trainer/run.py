"""Runs a training: its steps, its files, its result."""

import math
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, partial

import torch
from rich.console import Console

from policy_trainer.config import TrainConfig
from policy_trainer.data.problem import Task
from policy_trainer.data.tasks.registry import make_task, steps_of_epochs
from policy_trainer.learner.ranks.world import World
from policy_trainer.processes.fork_server import ForkServer
from policy_trainer.processes.lifecycle.endings import RunFailed, Stopped
from policy_trainer.reporting.metrics import truncate_metrics
from policy_trainer.reporting.tracking import refuse_missing
from policy_trainer.run_files.checkpoint import Checkpoints, RunFiles, TrainState, read_state
from policy_trainer.run_files.recording import open_recording
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.trainer.assembly import build_trainer
from policy_trainer.trainer.observer import Observer
from policy_trainer.trainer.parts import cpu_threads
from policy_trainer.weights.published.directory import WeightsDirectory
from shared.devices import choose_device, deterministic_operations
from shared.models import use_threads
from shared.spelling import spell_setting


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. seconds: of the training loop, in all processes of the run."""

    finished: bool
    steps: int
    seconds: float
    batches: int
    best_step: int | None


def train(
    config: TrainConfig,
    console: Console,
    observer: Observer | None = None,
    world: World | None = None,
    *,
    forks: ForkServer | None = None,
    trial: bool = False,
) -> TrainResult:
    """Trains until the last step or a request to stop.

    observer: gets the trainer's seconds and steps. world: the ranks that share the policy; this is rank 0.
    forks: starts the children, which then need not import PyTorch. trial: leave nothing on the server besides batches.
    Raises UserError for a configuration that cannot be used, RunFailed for a run that cannot go on.
    """
    refuse_missing(config.report_to)
    task = cache(partial(make_task, config))  # num_train_epochs and the policy need it: its data is read once
    counted = count_steps(config, task, console)
    with RunDirectory(config.run_dir).hold():
        # `config`, not `counted`: config.toml keeps num_train_epochs, and a resumed run counts again.
        files = open_run(config, console, trial=trial)
        with ExitStack() as stack, suppress(Stopped):
            stack.callback(torch.set_num_threads, torch.get_num_threads())  # those of the script that called
            threads = cpu_threads(config, ranks=1 if world is None else world.size)
            use_threads(threads)
            if config.max_lag == 0:
                stack.enter_context(deterministic_operations(choose_device(config.device)))
            # Not in the run's config.toml: another machine that resumes it may have other cores.
            sharing = counted.model_copy(update={"threads": threads})
            build_trainer(sharing, task, files, console, stack, observer or Observer(), world, forks).run()
    state = files.state
    finished = state.step >= counted.max_steps
    if finished and not state.trained_tokens:
        failure = RunFailed(
            "the run trained no token: no group had rewards that differ, or none could be judged. The model in "
            f"{files.directory.model} is the one that the run began with",
            "docs/troubleshooting.md has what to try",
        )
        if observer is None or observer.must_train:
            raise failure
        console.print(str(failure), highlight=False, soft_wrap=True)
    return TrainResult(finished, state.step, state.training_seconds, state.batches, state.best_step)


def count_steps(config: TrainConfig, task: Callable[[], Task], console: Console) -> TrainConfig:
    """The configuration with the steps of the run: those of max_steps or num_train_epochs, at most those that
    max_updates needs.

    task: makes the task. Raises UserError for a task that has no epochs.
    """
    counted = _steps_or_epochs(config, task, console)
    if config.max_updates is None:
        return counted
    needed = math.ceil(config.max_updates / config.updates_per_step)
    return counted.model_copy(update={"max_steps": min(counted.max_steps, needed)})


def _steps_or_epochs(config: TrainConfig, task: Callable[[], Task], console: Console) -> TrainConfig:
    epochs = config.num_train_epochs
    if epochs is None:
        return config
    if config.max_steps:
        console.print(
            f"max_steps = {config.max_steps} is given, so num_train_epochs = {epochs:g} is not used; "
            f"{spell_setting('max_steps', 0)} lets it decide",
            highlight=False,
        )
        return config
    steps = steps_of_epochs(config, task())
    console.print(f"num_train_epochs = {epochs:g}: {steps} steps of {config.groups_per_step} prompts", highlight=False)
    return config.model_copy(update={"max_steps": steps})


def open_run(config: TrainConfig, console: Console, *, trial: bool = False) -> RunFiles:
    """Opens the run's files, and removes what is later than the checkpoint to resume from.

    Raises UserError if the directory holds a run and resume is off.
    """
    directory = RunDirectory(config.run_dir)
    resumed = directory.open(config, console, resume=config.resume)
    lineage = directory.keep_lineage() if config.resume else directory.begin_lineage()
    checkpoints = Checkpoints(directory.checkpoints, keep=config.checkpoint.save_total_limit)
    checkpoint = checkpoints.newest() if resumed else None
    state = read_state(checkpoint) if checkpoint else TrainState()
    published = WeightsDirectory(directory.weights).newest()
    if checkpoint or published:  # a new epoch invalidates batches that were sampled after the checkpoint
        state.epoch = max(state.epoch, published.epoch if published else 0) + 1
    if config.record is not None:
        open_recording(config.record, resumed_at=state.step if resumed else None)
    if resumed:
        checkpoints.discard_after(state.step)
        truncate_metrics(directory.metrics, state.step)
        truncate_metrics(directory.samples, state.step)
    return RunFiles(directory, checkpoints, checkpoint, state, lineage, trial)
