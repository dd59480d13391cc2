"""The command `policy-trainer reward-model`."""

from rich.console import Console

from policy_trainer.cli.settings import read_settings
from policy_trainer.cli.status import tell_device, training_status
from policy_trainer.config import RewardTrainingConfig
from policy_trainer.run_files.run_directory import RunDirectory


def run(arguments: list[str]) -> int:
    config = read_settings(RewardTrainingConfig, arguments, "reward-model")
    RunDirectory(config.run_dir).check(config, resume=config.resume)
    # Late, so that wrong options fail before PyTorch loads.
    from policy_trainer.reward_model.training import train_reward_model

    console = Console(stderr=True)
    tell_device(config.device, console)
    return training_status(train_reward_model(config, console), config.run_dir, console)
