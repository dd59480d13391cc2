"""Reads the settings of a command."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic_settings import InitSettingsSource

from policy_trainer.cli.published_settings import published_settings
from policy_trainer.config import (
    DoctorConfig,
    EvalConfig,
    RewardTrainingConfig,
    RolloutConfig,
    SftConfig,
    TrainConfig,
)
from policy_trainer.config.names import COMMANDS, HINTS
from policy_trainer.config.presets import SETTINGS
from policy_trainer.run_files.run_directory import RunDirectory
from shared.settings import EarlierRun, FindEarlier, PresetSource, Settings, load_settings


class FileSchema(DoctorConfig, RolloutConfig, SftConfig, RewardTrainingConfig):  # type: ignore[misc]
    """The schema of the environment: the settings of every command.

    If sections share a name, the first base class wins.
    """


class RolloutFile(TrainConfig, RolloutConfig):  # type: ignore[misc]
    """The schema of a file for `rollout`: its own settings, and those of a run's config.toml."""


class EvalFile(TrainConfig, EvalConfig):  # type: ignore[misc]
    """The schema of a file for `eval`: its own settings, and those of a run's config.toml."""


FILES: Mapping[str, type[BaseModel]] = {**COMMANDS, "rollout": RolloutFile, "eval": EvalFile}


def read_settings(
    cls: type[Settings], arguments: list[str], command: str, *, otherwise: Mapping[str, Any] = MappingProxyType({})
) -> Settings:
    """Reads the settings. Exits with status 2 and a reason when an argument or value is invalid.

    otherwise: values of those that are given nowhere, in place of their defaults.
    """
    prog = f"policy-trainer {command}"
    earlier = [EarlierRun(cls, EARLIER[command], prog)] if command in EARLIER else []
    return load_settings(
        cls,
        arguments,
        prog=prog,
        schema=FileSchema,
        file_schema=FILES[command],
        weaker=[*earlier, PresetSource(cls, SETTINGS), InitSettingsSource(cls, dict(otherwise))],
        hints=HINTS,
    )


def _resumed(cls: type[BaseModel], given: Mapping[str, Any]) -> Path | None:
    """The config.toml of the run that --resume continues; None if there is none.

    Raises ValueError if there is none and required settings are missing.
    """
    run_dir = given.get("run_dir") or cls.model_fields["run_dir"].default
    if not TypeAdapter(bool).validate_python(given.get("resume", False)):
        return None
    config = RunDirectory(Path(run_dir)).config
    if config.exists():
        return config
    if missing := [name for name, field in cls.model_fields.items() if field.is_required() and name not in given]:
        raise ValueError(
            f"run_dir: there is no run in {run_dir} to resume; give the directory of a run, or what a new one needs: "
            + ", ".join(missing)
        )
    return None  # given all settings, --resume may also start a run, as with docker compose


EARLIER: Mapping[str, FindEarlier] = {
    "train": partial(_resumed, TrainConfig),
    "sft": partial(_resumed, SftConfig),
    "reward-model": partial(_resumed, RewardTrainingConfig),
    "rollout": published_settings,
}
