"""What a resumed run may change. Batches of its earlier life wait in the queue and must stay right."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

# Settings, and sections of them, that decide what is sampled and how it is judged, or which data a step sees.
FIXED = (
    "preset", "run", "seed", "model", "revision", "teacher", "task", "data", "rewards", "reward_weights", "judging",
    "sampling", "batch_size", "max_length", "lora",
)  # fmt: skip
# Those inside of these sections that decide only how much is computed at once, or for how long.
FREE = (
    "judging.seconds", "judging.memory_gib", "judging.workers", "judging.model.device", "judging.model.batch_size",
    "judging.http", "sampling.num_generations", "sampling.prompts_per_round", "sampling.max_resamples",
    "sampling.regroup",
)  # fmt: skip
# Settings of a process, which the run's config.toml does not keep.
NOT_KEPT = {"config", "resume", "dry_run", "batches"}
# Beside them a secret, and the directory that the file was found in.
_NOT_COMPARED = NOT_KEPT | {"token", "run_dir"}


@dataclass(frozen=True)
class Change:
    """A setting whose value differs from that of the run's earlier life; as JSON types."""

    name: str
    before: Any
    after: Any

    @property
    def allowed(self) -> bool:
        return _within(self.name, FREE) or not _within(self.name, FIXED)

    def __str__(self) -> str:
        return f"{self.name}: {_short(self.before)} -> {_short(self.after)}"


def changes(before: Mapping[str, Any], config: BaseModel) -> list[Change]:
    """The settings that differ, in the order of the command's settings.

    before: the tables of the earlier life's config.toml, where None is left out. A setting that it does not have, from
    a version without it, had the default of today.
    """
    was, now = default_settings(type(config)) | flat_settings(before), flat_settings(_as_json(config))
    # A default that is None stands for a setting that was left out; a table of free keys has no default.
    names = [*now, *(name for name in flat_settings(before) if name not in now)]
    found = (Change(name, was.get(name), now.get(name)) for name in names)
    return [change for change in found if not _same(change.before, change.after)]


def default_settings(cls: type[BaseModel]) -> dict[str, Any]:
    """The defaults of a command by their dotted names. A setting that has none is left out."""
    return flat_settings(_as_json(cls.model_construct()))


def _as_json(config: BaseModel) -> dict[str, Any]:
    return json.loads(config.model_dump_json(exclude=_NOT_COMPARED, warnings=False))


def flat_settings(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables by dotted names, without what is no setting of a run."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        found |= flat_settings(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return {name: value for name, value in found.items() if name not in _NOT_COMPARED}


def _same(before: Any, after: Any) -> bool:
    """Whether two values mean the same: also two paths that lead to the same file."""
    if isinstance(before, str) and isinstance(after, str) and before != after:
        paths = Path(before), Path(after)
        return all(path.exists() for path in paths) and paths[0].samefile(paths[1])
    return before == after


def _within(name: str, settings: Sequence[str]) -> bool:
    return any(name == setting or name.startswith(f"{setting}.") for setting in settings)


def _short(value: Any) -> str:
    text = "not given" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
