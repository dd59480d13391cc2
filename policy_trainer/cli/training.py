"""The commands that run something: `train`, also under torchrun, `rollout`, `replay`, `sft`, `reward-model`, `export`,
`demo` and `demo-setup`.

What needs PyTorch is imported late, so that wrong options fail at once.
"""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from policy_trainer.cli.settings import read_settings
from policy_trainer.cli.status import print_commands, tell_device, training_status
from policy_trainer.config import (
    ENV_PREFIX,
    DemoConfig,
    DemoSetupConfig,
    ExportConfig,
    ReplayConfig,
    RewardTrainingConfig,
    RolloutConfig,
    SftConfig,
    TrainConfig,
)
from policy_trainer.processes.fork_server import fork_server
from policy_trainer.processes.variables import in_torchrun
from policy_trainer.run_files.run_directory import RunDirectory
from shared.process import quick_imports, when_parent_is_gone

if TYPE_CHECKING:
    from policy_trainer.learner.ranks.world import World


def train(arguments: list[str]) -> int:
    config = read_settings(TrainConfig, arguments, "train")
    directory = RunDirectory(config.run_dir)
    if os.environ.get("RANK", "0") == "0":
        directory.check(config, resume=config.resume)
        done = config.resume and config.max_steps and directory.finished >= config.max_steps
        if done and not in_torchrun():  # there the other ranks would wait for this one
            print(
                f"policy-trainer train: the run in {directory.root} finished at step {directory.finished}; its model "
                f"is in {directory.model}. A higher --max-steps continues it",
                file=sys.stderr,
            )
            return 0
    return run_as_rank(config, partial(_train, config)) if in_torchrun() else _train(config)


def run_as_rank(config: TrainConfig, lead: Callable[["World"], int]) -> int:
    """Runs `lead` on rank 0; the other ranks execute its commands. Returns the exit status.

    Ranks end when torchrun has ended: a torchrun that is killed does not end them itself.
    """
    when_parent_is_gone(os.getppid(), _end_orphan)
    from policy_trainer.learner.ranks.lead import follow
    from policy_trainer.learner.ranks.world import join_world

    with join_world(config.device, config.rank_timeout_seconds) as world:
        if world.rank:
            return follow(world)
        status = lead(world)
        world.end(status)
        return status


def _end_orphan() -> None:
    print(
        "policy-trainer: torchrun has ended, so this rank ends, too. "
        "`train` with --resume goes on from the last checkpoint",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)  # in the middle of whatever it does, as if killed: a follower may be waiting in native code


def _train(config: TrainConfig, world: "World | None" = None) -> int:
    console = Console(stderr=True)
    with fork_server(config) as forks:
        with quick_imports():
            from policy_trainer.trainer.run import train as train_policy

        tell_device(config.device, console)
        result = train_policy(config, console, world=world, forks=forks)
    if result.finished:
        # The run is complete: stopping its containers after a worker has exited must not make it fail.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return training_status(result, config.run_dir, console)


def rollout(arguments: list[str]) -> int:
    config = read_settings(RolloutConfig, arguments, "rollout")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if len(config.devices) > 1:
        from policy_trainer.rollout.device_workers import run_device_workers

        settings = {name: value for name, value in os.environ.items() if name.startswith(ENV_PREFIX)}
        run_device_workers(config, arguments, settings)
        return 0
    with quick_imports():
        from policy_trainer.rollout.run import run_worker

    run_worker(config)
    return 0


def replay(arguments: list[str]) -> int:
    config = read_settings(ReplayConfig, arguments, "replay")
    RunDirectory(config.run_dir).check(config, resume=False, replay=True)
    from policy_trainer.trainer.replay import replay as train_on_records

    console = Console(stderr=True, highlight=False)
    tell_device(config.device, console)
    result = train_on_records(config, console)
    console.print(f"{result.steps} steps in {result.seconds:.1f} s; the model is in {config.run_dir / 'model'}")
    return 0 if result.finished else 128 + signal.SIGINT


def sft(arguments: list[str]) -> int:
    config = read_settings(SftConfig, arguments, "sft")
    RunDirectory(config.run_dir).check(config, resume=config.resume)
    from policy_trainer.supervised.sft import sft as fine_tune

    console = Console(stderr=True)
    tell_device(config.device, console)
    return training_status(fine_tune(config, console), config.run_dir, console)


def reward_model(arguments: list[str]) -> int:
    config = read_settings(RewardTrainingConfig, arguments, "reward-model")
    RunDirectory(config.run_dir).check(config, resume=config.resume)
    from policy_trainer.supervised.reward_model.training import train_reward_model

    console = Console(stderr=True)
    tell_device(config.device, console)
    return training_status(train_reward_model(config, console), config.run_dir, console)


def export(arguments: list[str]) -> int:
    config = read_settings(ExportConfig, arguments, "export")
    from policy_trainer.learner.ranks.export import export as export_checkpoint

    export_checkpoint(config.checkpoint, config.output, config.model)
    print(config.output)
    return 0


def demo(arguments: list[str]) -> int:
    config = read_settings(DemoConfig, arguments, "demo")
    from policy_trainer.cli.demo.demo import demo as run_demo

    console = Console()
    status = run_demo(config, console)
    if status != 128 + signal.SIGINT:
        print_commands(config.run_dir, console)
    return status


def demo_setup(arguments: list[str]) -> int:
    config = read_settings(DemoSetupConfig, arguments, "demo-setup")
    from policy_trainer.cli.demo.demo import set_up

    print(set_up(config))
    return 0
