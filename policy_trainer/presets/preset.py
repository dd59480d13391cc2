"""What a preset is: numbers with their sources, and what is not as it was published."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from policy_trainer.config.task_settings import SOURCE_SETTINGS


@dataclass(frozen=True)
class Number:
    """The value of one setting, where it comes from, and how it departs from there, if it does."""

    value: Any
    source: str
    deviation: str = ""


@dataclass(frozen=True)
class Preset:
    """Settings of a published recipe, by their dotted names. What it leaves out keeps its default.

    data: what it was published with. deviations: those that belong to no single setting. unpublished: what the recipe
    does not tell, so that a default of ours holds. wants: settings that must be given besides, and as what.
    """

    name: str
    summary: str
    origin: str
    data: str
    numbers: Mapping[str, Number]
    deviations: tuple[str, ...] = ()
    unpublished: tuple[str, ...] = ()
    wants: Mapping[str, str] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """The same as nested tables, as a TOML file would hold them."""
        return nested({name: number.value for name, number in self.numbers.items()})

    def beside(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """The same, to hold where others have said nothing: another task than the preset's takes none of its data."""
        settings = self.settings()
        if said.get("task", settings.get("task")) != settings.get("task"):
            data = settings.get("data", {})
            settings["data"] = {name: value for name, value in data.items() if name not in SOURCE_SETTINGS}
        return settings


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} -> {"a": {"b": 1}}"""
    tables: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        table = tables
        for key in path:
            table = table.setdefault(key, {})
        table[last] = value
    return tables


# Holds for every recipe that samples and trains in turn, while ours do both at once.
AT_ONCE = (
    "The original samples and trains in turn. Here workers sample while a step trains, so that batches are some steps "
    "old: --max-lag 0 trains on those of the newest weights alone, --max-waiting bounds how many wait."
)
# Of every recipe that renews its reference.
SNAPSHOT_ROOT: Mapping[str, str] = {
    "reference.snapshot_root": "the directory that ref-server was given as --snapshot-root; without one, "
    "--reference.sync-steps 0 keeps the reference as it began"
}
