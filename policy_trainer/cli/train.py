"""The command `policy-trainer train`."""

import signal

from rich.console import Console

from policy_trainer.cli.settings import read_settings
from policy_trainer.cli.status import training_status
from policy_trainer.config import TrainConfig


def run(arguments: list[str]) -> int:
    config = read_settings(TrainConfig, arguments, "train")
    from policy_trainer.trainer.run import train  # PyTorch takes seconds: mistakes in the options answer at once

    console = Console(stderr=True)
    result = train(config, console)
    if result.finished:
        # Nothing is left to stop: a run does not fail because its containers are stopped once a worker has ended.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return training_status(result, config.run_dir, console)
