"""Reads the settings of a command, and knows the names that other programs give them."""

import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from policy_trainer.cli.published_settings import published_settings
from policy_trainer.config import (
    DemoConfig,
    DemoSetupConfig,
    DoctorConfig,
    EvalConfig,
    ExportConfig,
    ReplayConfig,
    RewardTrainingConfig,
    RolloutConfig,
    SftConfig,
    TrainConfig,
)
from policy_trainer.presets import SETTINGS
from policy_trainer.run_files.run_directory import RunDirectory
from shared.settings import EarlierRun, FindEarlier, Hints, PresetSource, Settings, load_settings

_TABLE: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    Path(__file__).with_name("trl.toml").read_text(encoding="utf-8")
)
# By section: TRL's name -> "our names | a note", or a mark of NO_SETTING and why there is none.
TRL: Mapping[str, Mapping[str, str]] = {
    title: entries for title, entries in _TABLE.items() if title not in ("Metrics", "defaults", "types")
}
# Of all sections: TRL's name -> our names, or a mark of NO_SETTING; and the note.
TRL_ENTRIES: Mapping[str, tuple[str, ...]] = {
    name: entry.partition(" | ")[::2] for section in TRL.values() for name, entry in section.items()
}
# TRL's metrics -> ours, and the note.
TRL_METRICS: Mapping[str, tuple[str, ...]] = {
    name: entry.partition(" | ")[::2] for name, entry in _TABLE["Metrics"].items()
}
# TRL's own value of each field of GRPOConfig.
TRL_DEFAULTS: Mapping[str, Any] = {
    name: None if value == "None" else value for name, value in _TABLE["defaults"].items()
}
# Fields of GRPOConfig whose type does not follow from the default -> the type, as written in Python.
TRL_TYPES: Mapping[str, str] = {name: kind for kind, names in _TABLE["types"].items() for name in names.split()}
# `*`: the result does not depend on it, so that policy_trainer.trl takes any value.
NO_SETTING = ("-", "*")

# A name in another program -> ours.
RENAMED: Mapping[str, tuple[str, ...]] = {
    **{name: tuple(ours.split()) for name, (ours, _) in TRL_ENTRIES.items() if ours not in (*NO_SETTING, name)},
    "torch_dtype": ("dtype",),
    "lr": ("optimizer.learning_rate",),
    "kl_coef": ("loss.beta",),
    "kl_beta": ("loss.beta",),
    "max_new_tokens": ("sampling.max_completion_length",),
    "max_tokens": ("sampling.max_completion_length", "max_length"),
    "group_size": ("sampling.num_generations",),
}

# A name that is no setting -> why not, and what to do instead: names in TRL, and --dry-run of many programs.
ABSENT: Mapping[str, str] = {
    **{name: note for name, (ours, note) in TRL_ENTRIES.items() if ours in NO_SETTING},
    "dry_run": "`policy-trainer doctor` takes one group through everything, and keeps nothing",
}

COMMANDS: Mapping[str, type[BaseModel]] = {
    "train": TrainConfig,
    "doctor": DoctorConfig,
    "replay": ReplayConfig,
    "rollout": RolloutConfig,
    "eval": EvalConfig,
    "sft": SftConfig,
    "reward-model": RewardTrainingConfig,
    "export": ExportConfig,
    "demo": DemoConfig,
    "demo-setup": DemoSetupConfig,
}
HINTS = Hints(COMMANDS, RENAMED, ABSENT)


class FileSchema(DoctorConfig, RolloutConfig, SftConfig, RewardTrainingConfig):  # type: ignore[misc]
    """The schema of the environment: the settings of every command.

    If sections share a name, the first base class wins.
    """


class RolloutFile(TrainConfig, RolloutConfig):  # type: ignore[misc]
    """The schema of a file for `rollout`: its own settings, and those of a run's config.toml."""


class EvalFile(TrainConfig, EvalConfig):  # type: ignore[misc]
    """The schema of a file for `eval`: its own settings, and those of a run's config.toml."""


FILES: Mapping[str, type[BaseModel]] = {**COMMANDS, "rollout": RolloutFile, "eval": EvalFile}


def read_settings(cls: type[Settings], arguments: list[str], command: str) -> Settings:
    """Reads the settings. Exits with status 2 and a reason when an argument or value is invalid."""
    prog = f"policy-trainer {command}"
    earlier = [EarlierRun(cls, EARLIER[command], prog)] if command in EARLIER else []
    return load_settings(
        cls,
        arguments,
        prog=prog,
        schema=FileSchema,
        file_schema=FILES[command],
        weaker=[*earlier, PresetSource(cls, SETTINGS)],
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
