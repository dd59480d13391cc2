"""The command `policy-trainer replay`."""

import signal

from rich.console import Console

from policy_trainer.cli.settings import read_settings
from policy_trainer.cli.status import tell_device
from policy_trainer.config import ReplayConfig
from policy_trainer.run_files.run_directory import REPLAY, RunDirectory


def run(arguments: list[str]) -> int:
    config = read_settings(ReplayConfig, arguments, "replay")
    RunDirectory(config.run_dir).check(config, resume=False, remedy=REPLAY)
    from policy_trainer.trainer.replay import replay  # late, so that wrong options fail before PyTorch loads

    console = Console(stderr=True, highlight=False)
    tell_device(config.device, console)
    result = replay(config, console)
    console.print(f"{result.steps} steps in {result.seconds:.1f} s; the model is in {config.run_dir / 'model'}")
    return 0 if result.finished else 128 + signal.SIGINT
