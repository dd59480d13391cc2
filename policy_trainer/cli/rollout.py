"""The command `policy-trainer rollout`."""

import os
import signal

from policy_trainer.cli.settings import read_settings
from policy_trainer.config import ENV_PREFIX, RolloutConfig


def run(arguments: list[str]) -> int:
    config = read_settings(RolloutConfig, arguments, "rollout")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if len(config.devices) > 1:
        from policy_trainer.rollout.device_workers import DeviceWorkers

        settings = {name: value for name, value in os.environ.items() if name.startswith(ENV_PREFIX)}
        DeviceWorkers(config, arguments, settings).run()
        return 0
    from policy_trainer.rollout.run import run_worker  # late, so that wrong options fail before PyTorch loads

    run_worker(config)
    return 0
