"""Reads the settings of a command."""

from policy_trainer.config import RolloutConfig, SftConfig, TrainConfig
from policy_trainer.presets import SETTINGS
from shared.settings import Settings, load_settings


class FileSchema(TrainConfig, RolloutConfig, SftConfig):  # type: ignore[misc]
    """The schema of a TOML file: the settings of every command. If sections share a name, the first base class wins."""


def read_settings(cls: type[Settings], arguments: list[str], command: str) -> Settings:
    """Reads the settings. Exits with status 2 and a reason when an argument or value is invalid."""
    prog = f"policy-trainer {command}"
    return load_settings(cls, arguments, prog=prog, schema=FileSchema, presets=SETTINGS)
