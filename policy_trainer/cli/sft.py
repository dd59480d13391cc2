"""The command `policy-trainer sft`."""

from rich.console import Console

from policy_trainer.cli.settings import read_settings
from policy_trainer.cli.status import tell_device, training_status
from policy_trainer.config import SftConfig
from policy_trainer.run_files.run_directory import RunDirectory


def run(arguments: list[str]) -> int:
    config = read_settings(SftConfig, arguments, "sft")
    RunDirectory(config.run_dir).check(config, resume=config.resume)
    from policy_trainer.sft.sft import sft  # late, so that wrong options fail before PyTorch loads

    console = Console(stderr=True)
    tell_device(config.device, console)
    return training_status(sft(config, console), config.run_dir, console)
