"""The command `policy-trainer demo`."""

from rich.console import Console

from policy_trainer.cli.settings import read_settings
from policy_trainer.config import DemoConfig


def run(arguments: list[str]) -> int:
    config = read_settings(DemoConfig, arguments, "demo")
    from policy_trainer.demo.demo import demo  # late, so that wrong options fail before PyTorch loads

    return demo(config, Console())
