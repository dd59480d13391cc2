"""The command `policy-trainer train`, also under torchrun."""

import os
import signal
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from policy_trainer.cli.settings import read_settings
from policy_trainer.cli.status import tell_device, training_status
from policy_trainer.config import TrainConfig
from policy_trainer.lifecycle.processes import in_torchrun
from policy_trainer.run_files.run_directory import RunDirectory
from shared.process import when_parent_is_gone

if TYPE_CHECKING:  # PyTorch loads late, so that wrong options fail at once
    from policy_trainer.ranks.world import World


def run(arguments: list[str]) -> int:
    config = read_settings(TrainConfig, arguments, "train")
    directory = RunDirectory(config.run_dir)
    if not config.dry_run and os.environ.get("RANK", "0") == "0":
        directory.check(config, resume=config.resume)
        done = config.resume and config.max_steps and directory.finished >= config.max_steps
        if done and not in_torchrun():  # there the other ranks would wait for this one
            print(
                f"policy-trainer train: the run in {directory.root} finished at step {directory.finished}; its model "
                f"is in {directory.model}. A higher --max-steps continues it",
                file=sys.stderr,
            )
            return 0
    return _as_rank(config) if in_torchrun() else _train(config)


def _as_rank(config: TrainConfig) -> int:
    """Rank 0 trains as ever, and the others do what it tells them. torchrun's end is theirs: one that is killed ends no
    rank itself."""
    when_parent_is_gone(os.getppid(), _end_orphan)
    from policy_trainer.ranks.lead import follow
    from policy_trainer.ranks.world import join_world

    with join_world(config.device, config.rank_timeout_seconds) as world:
        if world.rank == 0:
            return _train(config, world)
        follow(world)
        return 0


def _end_orphan() -> None:
    print(
        "policy-trainer train: torchrun has ended, so this rank ends, too. "
        "The same command with --resume goes on from the last checkpoint",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)  # in the middle of whatever it does, as if killed: a follower may be waiting in native code


def _train(config: TrainConfig, world: "World | None" = None) -> int:
    from policy_trainer.trainer.run import train

    console = Console(stderr=True)
    tell_device(config.device, console)
    if config.dry_run:
        from policy_trainer.trainer.dry_run import dry_run

        return 0 if dry_run(config, console, world).finished else 128 + signal.SIGINT
    result = train(config, console, world=world)
    if result.finished:
        # The run is complete: stopping its containers after a worker has exited must not make it fail.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return training_status(result, config.run_dir, console)
