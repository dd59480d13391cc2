"""A preset: the settings of a published recipe, read from a TOML file."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from policy_trainer.config import LossConfig, TrainConfig
from policy_trainer.config.data import SOURCE_SETTINGS
from shared.settings import from_values
from shared.settings.names import flat_settings, nested_settings

# The deviation of every file with `samples_in_turn`.
SAMPLES_IN_TURN = (
    "The original samples and trains in turn. Here workers sample while a step trains, so that batches are some steps "
    "old: --max-lag 0 trains only on batches of the newest weights, --max-waiting limits how many wait."
)


class Setting(NamedTuple):
    """The value of one setting, where it was published, and the deviation from it, if any."""

    value: Any
    source: str
    deviation: str = ""


class Preset(BaseModel):
    """Settings by their dotted names. What a preset leaves out keeps its default.

    origin: where the recipe was published. data: the data it was published with. deviations: those that belong to no
    single setting. unpublished: settings that the recipe does not give; they keep our default. wants: settings that the
    user must give, and what each is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    summary: str
    origin: str
    data: str
    deviations: tuple[str, ...]
    unpublished: tuple[str, ...] = ()
    wants: Mapping[str, str] = {}
    settings: Mapping[str, Setting]

    def values_with(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values as nested tables. If the user chose another task, they lack those of `data` that say where
        problems are.

        given: the settings from stronger sources, as nested tables.
        """
        values = nested_settings({name: setting.value for name, setting in self.settings.items()})
        if given.get("task", values.get("task")) != values.get("task"):
            data = values.get("data", {})
            values["data"] = {name: value for name, value in data.items() if name not in SOURCE_SETTINGS}
        return values

    def config(self) -> TrainConfig:
        """The configuration of `train --preset`. A setting that the user must give gets its name in capitals."""
        wanted = {name: name.rpartition(".")[2].upper() for name in ("model", *self.wants)}
        values = wanted | {name: setting.value for name, setting in self.settings.items()}
        return from_values(TrainConfig, preset=self.name, **nested_settings(values))


def read_preset(path: Path) -> Preset:
    """Raises ValueError for unknown or missing keys; docs/presets.md has them all."""
    keys = _read(path)
    in_turn = (SAMPLES_IN_TURN,) if keys.pop("samples_in_turn", False) else ()
    deviations = (*in_turn, *keys.pop("deviations", ()))
    return Preset(name=path.stem, deviations=deviations, **keys)


def _read(path: Path) -> dict[str, Any]:
    """The keys of a file, settings by dotted names. A file that `extends` another overrides the other's keys."""
    keys = tomllib.loads(path.read_text(encoding="utf-8"))
    keys["settings"] = flat_settings(keys["settings"])
    if "extends" not in keys:
        return keys
    base = _read(path.with_name(f"{keys.pop('extends')}.toml"))
    return base | keys | {"settings": base["settings"] | keys["settings"]}


def surrogate(loss: LossConfig) -> str:
    chosen = loss.chosen_surrogate
    assert chosen is not None  # no preset has a function
    return f"{loss.surrogate}{chosen.summary(loss)}{_level(loss)}"


def _level(loss: LossConfig) -> str:
    return {"token": "", "sequence": ", sequences", "sequence_sum": ", sums"}[loss.importance_sampling_level]


def kl(loss: LossConfig) -> str:
    if not loss.beta:
        return "none"
    return f"{loss.kl} {loss.beta:g}" + {"loss": "", "reward": ", reward", "both": ", both"}[loss.kl_in]
