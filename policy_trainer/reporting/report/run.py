"""Reads a run's directory: its records, samples and settings. The run may be unfinished or killed."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from policy_trainer.config import RewardTrainingConfig, SftConfig, TrainConfig
from policy_trainer.config.marks import public_settings
from policy_trainer.reporting.metrics import Metrics, read_metrics
from policy_trainer.reporting.samples import SampledGroup, read_samples
from policy_trainer.run_files.run_directory import STATE, RunDirectory, checkpoint_versions
from shared.errors import UserError, printable
from shared.settings.files import read_toml
from shared.settings.names import unknown_names

# Larger numbers cannot be plotted.
_LARGEST = 1e30
_COMMANDS: Mapping[str, type[BaseModel]] = {
    "train": TrainConfig,
    "sft": SftConfig,
    "reward-model": RewardTrainingConfig,
}


@dataclass(frozen=True)
class RunSettings:
    """command: the command that made the run. given: dotted names and values of config.toml, without private settings.
    defaults: the command's current defaults. problem: why config.toml could not be read; empty if it was."""

    command: str
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    problem: str = ""

    @property
    def differing(self) -> dict[str, Any]:
        """The settings that differ from their defaults."""
        return {name: value for name, value in self.given.items() if value != self.defaults.get(name)}

    @property
    def usual(self) -> dict[str, Any]:
        return {name: value for name, value in self.given.items() if name not in self.differing}

    def __getitem__(self, name: str) -> Any:
        """The value or else the default; None without either."""
        return self.given.get(name, self.defaults.get(name))


@dataclass(frozen=True)
class RecordedRun:
    """steps, evaluations, warnings: records of metrics.jsonl. groups: those of samples.jsonl. progress: content of the
    newest checkpoint's trainer.json; empty without one."""

    root: Path
    name: str
    steps: Sequence[Metrics]
    evaluations: Sequence[Metrics]
    warnings: Sequence[Metrics]
    groups: Sequence[SampledGroup]
    settings: RunSettings
    progress: Mapping[str, Any]

    @property
    def last_step(self) -> int:
        return self.steps[-1]["step"] if self.steps else 0


def names_of(roots: Sequence[Path]) -> list[str]:
    """The shortest suffixes of the paths that are unique, usually just the directory's name.

    Raises UserError if a directory is named twice.
    """
    paths = [root.resolve().parts for root in roots]
    if twice := next((root for root, path in zip(roots, paths, strict=True) if paths.count(path) > 1), None):
        raise UserError(f"RUN_DIR: {twice} is named twice", "name each run once")
    ends = (["/".join(path[-length:]) for path in paths] for length in range(1, max(map(len, paths)) + 1))
    return [printable(name) for name in next(names for names in ends if len(set(names)) == len(names))]


def read_records(root: Path) -> list[Metrics]:
    """The records of metrics.jsonl. Raises UserError if the directory contains no run."""
    directory = RunDirectory(root)
    if not directory.config.exists() and not directory.metrics.exists():
        state = (
            "contains no run: it has neither config.toml nor metrics.jsonl" if root.is_dir() else "is not a directory"
        )
        raise UserError(f"RUN_DIR: {root} {state}", "name the --run-dir of a run")
    with _readable(root):
        records = read_metrics(directory.metrics)
    return [record for record in records if isinstance(record.get("step"), int) and "kind" in record]


def read_run(root: Path) -> RecordedRun:
    """Raises UserError if the directory contains no run."""
    directory = RunDirectory(root)
    records = read_records(root)
    with _readable(root):
        groups = [group for group in read_samples(directory.samples) if group.step is not None and group.completions]
    of_kind = {kind: [item for item in records if item["kind"] == kind] for kind in ("step", "evaluation", "health")}
    return RecordedRun(
        root=root,
        name=root.resolve().name,
        steps=of_kind["step"],
        evaluations=of_kind["evaluation"],
        warnings=of_kind["health"],
        groups=groups,
        settings=read_run_settings(directory.config, of_kind["step"]),
        progress=_progress(directory.checkpoints),
    )


@contextmanager
def _readable(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"RUN_DIR: {root} cannot be read: {error.strerror}") from error


def number(record: Mapping[str, Any], name: str) -> float:
    """The value of a metric, NaN if there is none."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else math.nan


def _progress(checkpoints: Path) -> Mapping[str, Any]:
    """A checkpoint may be deleted while it is read."""
    for path in reversed(checkpoint_versions(checkpoints).by_numbers().values()):
        try:
            progress = json.loads((path / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(progress, dict):
            return progress
    return {}


def read_run_settings(path: Path, steps: Sequence[Metrics]) -> RunSettings:
    """steps: the run's step records, which identify the command if config.toml cannot be read."""
    try:
        tables, problem = read_toml(path), ""
    except FileNotFoundError:
        tables, problem = {}, f"{path.name} is missing"
    except (OSError, ValueError) as error:
        tables, problem = {}, f"{path.name} cannot be read: {error}"
    if tables:  # the command that has most of the file's settings
        command = min(_COMMANDS, key=lambda name: sum(1 for _ in unknown_names(tables, _COMMANDS[name])))
    else:
        command = _command_of(steps)
    cls = _COMMANDS[command]
    return RunSettings(command, *public_settings(_as_json(tables), cls), problem)


def _as_json(value: Any) -> Any:
    """A value of a TOML file, with a text for what only TOML has: dates, times, infinity and NaN."""
    match value:
        case dict():
            return {name: _as_json(each) for name, each in value.items()}
        case list():
            return [_as_json(each) for each in value]
        case date() | time():
            return value.isoformat()
        case float() if not math.isfinite(value):
            return str(value)
    return value


def _command_of(steps: Sequence[Metrics]) -> str:
    names = {name for record in steps[:1] for name in record}
    if "reward_margin" in names:
        return "reward-model"
    return "sft" if names and "reward" not in names else "train"
