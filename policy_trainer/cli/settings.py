"""Reads the settings of a command."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from policy_trainer.cli.published_settings import published_settings
from policy_trainer.cli.spellings import ABSENT, RENAMED
from policy_trainer.config import (
    DemoConfig,
    DemoSetupConfig,
    DoctorConfig,
    EvalConfig,
    ExportConfig,
    PlanConfig,
    ReplayConfig,
    RewardTrainingConfig,
    RolloutConfig,
    SftConfig,
    TrainConfig,
)
from policy_trainer.presets import SETTINGS
from policy_trainer.run_files.run_directory import RunDirectory
from shared.settings import Hints, Settings, load_settings
from shared.settings.files import EarlierLife

COMMANDS: Mapping[str, type[BaseModel]] = {
    "train": TrainConfig,
    "plan": PlanConfig,
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
# What --help lists.
ESSENTIAL: Mapping[str, Sequence[str]] = {
    "train": (
        "model", "task", "data.path", "rewards", "run_dir", "resume", "dry_run", "max_steps", "num_train_epochs",
        "sampling.num_generations",
        "sampling.max_completion_length", "optimizer.learning_rate", "loss.beta", "server", "device", "config",
    ),
    "rollout": (
        "config", "run_dir", "server", "run", "weights", "trust_settings", "device", "devices", "dtype", "worker",
        "workers",
    ),
    "plan": (
        "model", "device", "reference.device", "dtype", "gpu_memory_gib", "ranks", "micro_batch_tokens",
        "gradient_checkpointing", "optimizer.offload", "sampling.num_generations", "sampling.max_completion_length",
        "groups_per_step", "server", "rollout", "config",
    ),
    "doctor": (
        "model", "task", "data.path", "rewards", "run_dir", "sampling.num_generations",
        "sampling.max_completion_length", "loss.beta", "server", "token_file", "device", "dtype", "config",
    ),
    "replay": (
        "batches", "config", "model", "run_dir", "max_steps", "groups_per_step", "num_iterations", "minibatches",
        "optimizer.learning_rate", "loss.beta", "loss.advantage", "loss.surrogate", "loss.aggregation", "device",
        "dtype",
    ),
    "eval": (
        "model", "task", "data.path", "data.eval_path", "rewards", "evaluation.problems", "evaluation.batch_size",
        "samples", "sampling.temperature", "sampling.max_completion_length", "device", "dtype", "config",
    ),
    "sft": (
        "model", "data.path", "data.eval_path", "run_dir", "resume", "num_train_epochs", "batch_size", "max_length",
        "optimizer.learning_rate", "device", "dtype", "config",
    ),
    "reward-model": (
        "model", "data.path", "data.dataset", "data.eval_path", "data.eval_split", "run_dir", "resume",
        "num_train_epochs", "batch_size", "max_length", "optimizer.learning_rate", "device", "dtype", "config",
    ),
}  # fmt: skip


class FileSchema(PlanConfig, RolloutConfig, SftConfig, RewardTrainingConfig):  # type: ignore[misc]
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
    return load_settings(
        cls,
        arguments,
        prog=f"policy-trainer {command}",
        schema=FileSchema,
        file_schema=FILES[command],
        presets=SETTINGS,
        earlier_life=EARLIER.get(command, _none),
        essential=ESSENTIAL.get(command, ()),
        hints=HINTS,
    )


def _earlier_life(cls: type[BaseModel], said: Mapping[str, Any]) -> Path | None:
    """The config.toml of the run that --resume continues; None if there is none.

    Raises ValueError if there is none and required settings are missing.
    """
    run_dir = said.get("run_dir") or cls.model_fields["run_dir"].default
    if not TypeAdapter(bool).validate_python(said.get("resume", False)):
        return None
    config = RunDirectory(Path(run_dir)).config
    if config.exists():
        return config
    if missing := [name for name, field in cls.model_fields.items() if field.is_required() and name not in said]:
        raise ValueError(
            f"run_dir: there is no run in {run_dir} to resume; give the directory of a run, or what a new one needs: "
            + ", ".join(missing)
        )
    return None  # given all settings, --resume may also start a run, as with docker compose


EARLIER: Mapping[str, EarlierLife] = {
    "train": partial(_earlier_life, TrainConfig),
    "sft": partial(_earlier_life, SftConfig),
    "reward-model": partial(_earlier_life, RewardTrainingConfig),
    "rollout": published_settings,
}


def _none(said: Mapping[str, Any]) -> None:
    return None
