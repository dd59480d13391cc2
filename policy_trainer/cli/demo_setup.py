"""The command `policy-trainer demo-setup`."""

from policy_trainer.cli.settings import read_settings
from policy_trainer.config import DemoSetupConfig


def run(arguments: list[str]) -> int:
    config = read_settings(DemoSetupConfig, arguments, "demo-setup")
    from policy_trainer.demo.demo import set_up  # late, so that wrong options fail before PyTorch loads

    print(set_up(config))
    return 0
