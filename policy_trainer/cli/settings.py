"""Reads the settings of a command."""

from policy_trainer.config import RolloutConfig, SftConfig, TrainConfig
from policy_trainer.presets import SETTINGS
from shared.settings import Settings, load_settings


class FileSchema(TrainConfig, RolloutConfig, SftConfig):  # type: ignore[misc]
    """What one TOML file may hold: the settings of every command. Where groups share a name, the first has most."""


def read_settings(cls: type[Settings], arguments: list[str], command: str) -> Settings:
    """Exits with status 2 and a reason when they are not settings of the command."""
    prog = f"policy-trainer {command}"
    return load_settings(cls, arguments, prog=prog, schema=FileSchema, presets=SETTINGS)
