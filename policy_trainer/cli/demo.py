"""The command `policy-trainer demo`."""

from rich.console import Console

from policy_trainer.cli.settings import read_settings
from policy_trainer.config import DemoConfig


def run(arguments: list[str]) -> int:
    config = read_settings(DemoConfig, arguments, "demo")
    from policy_trainer.demo.demo import demo  # PyTorch takes seconds: mistakes in the options answer at once

    return demo(config, Console())
