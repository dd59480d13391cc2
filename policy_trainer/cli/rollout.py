"""The command `policy-trainer rollout`."""

import signal

from policy_trainer.cli.settings import read_settings
from policy_trainer.config import RolloutConfig


def run(arguments: list[str]) -> int:
    config = read_settings(RolloutConfig, arguments, "rollout")
    from policy_trainer.rollout.worker import run_worker  # late, so that wrong options fail before PyTorch loads

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_worker(config)
    return 0
