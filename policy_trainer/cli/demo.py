"""The commands `demo` and `demo-setup`."""

from rich.console import Console

from policy_trainer.cli.settings import read_settings
from policy_trainer.config import DemoConfig, DemoSetupConfig


def demo(arguments: list[str]) -> int:
    config = read_settings(DemoConfig, arguments, "demo")
    from policy_trainer.demo.demo import demo as run_demo  # late, so that wrong options fail before PyTorch loads

    return run_demo(config, Console())


def demo_setup(arguments: list[str]) -> int:
    config = read_settings(DemoSetupConfig, arguments, "demo-setup")
    from policy_trainer.demo.demo import set_up  # late, so that wrong options fail before PyTorch loads

    print(set_up(config))
    return 0
