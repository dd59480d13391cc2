"""A run's config.toml beside the defaults of its command."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from policy_trainer.config import RewardTrainingConfig, SftConfig, TrainConfig
from policy_trainer.config.marks import Travel, compared_settings, default_settings, marked
from policy_trainer.reporting.metrics import Metrics
from shared.settings.files import read_toml
from shared.settings.names import unknown_names

_COMMANDS: Mapping[str, type[BaseModel]] = {
    "train": TrainConfig,
    "sft": SftConfig,
    "reward-model": RewardTrainingConfig,
}


@dataclass(frozen=True)
class RunSettings:
    """command: what made the run. given: dotted names and values of the file, without addresses. defaults: those of the
    command today. problem: why the file tells nothing; empty if it does."""

    command: str
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    problem: str = ""

    @property
    def differing(self) -> dict[str, Any]:
        """Those that are not the defaults."""
        return {name: value for name, value in self.given.items() if value != self.defaults.get(name)}

    @property
    def usual(self) -> dict[str, Any]:
        return {name: value for name, value in self.given.items() if name not in self.differing}

    def __getitem__(self, name: str) -> Any:
        """The value, or its default; None where neither says one."""
        return self.given.get(name, self.defaults.get(name))


def read_run_settings(path: Path, steps: Sequence[Metrics]) -> RunSettings:
    """steps: the records of the run's steps, which tell its command where the file does not."""
    try:
        tables, problem = read_toml(path), ""
    except FileNotFoundError:
        tables, problem = {}, f"{path.name} is not there"
    except (OSError, ValueError) as error:
        tables, problem = {}, f"{path.name} cannot be read: {error}"
    command = _of_tables(tables) if tables else _of_records(steps)
    cls = _COMMANDS[command]
    private = marked(cls, Travel.PRIVATE)
    given, usual = (
        {name: value for name, value in settings.items() if name.partition(".")[0] not in private}
        for settings in (compared_settings(tables, cls), default_settings(cls))
    )
    return RunSettings(command, given, usual, problem)


def _of_tables(tables: Mapping[str, Any]) -> str:
    """The command that knows the most of the file's settings."""
    return min(_COMMANDS, key=lambda name: sum(1 for _ in unknown_names(tables, _COMMANDS[name])))


def _of_records(steps: Sequence[Metrics]) -> str:
    names = {name for record in steps[:1] for name in record}
    if "reward_margin" in names:
        return "reward-model"
    return "sft" if names and "reward" not in names else "train"
