"""The command `policy-trainer train`."""

import signal

from rich.console import Console

from policy_trainer.cli.settings import read_settings
from policy_trainer.cli.status import tell_device, training_status
from policy_trainer.config import TrainConfig


def run(arguments: list[str]) -> int:
    config = read_settings(TrainConfig, arguments, "train")
    from policy_trainer.trainer.run import train  # late, so that wrong options fail before PyTorch loads

    console = Console(stderr=True)
    tell_device(config.device, console)
    if config.dry_run:
        from policy_trainer.trainer.dry_run import dry_run

        return 0 if dry_run(config, console).finished else 128 + signal.SIGINT
    result = train(config, console)
    if result.finished:
        # The run is complete: stopping its containers after a worker has exited must not make it fail.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return training_status(result, config.run_dir, console)
