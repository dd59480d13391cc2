"""The directory of one worker below the run's."""

from pathlib import Path

from policy_trainer.config import RolloutConfig
from policy_trainer.run_files.run_directory import RunDirectory


def own_directory(config: RolloutConfig) -> Path:
    return RunDirectory(config.run_dir).workers / f"{config.worker}-of-{config.workers}"
