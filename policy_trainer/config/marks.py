"""What a setting says about itself, in marks of its annotation: whether it travels, and whether --resume may change it.

The mark of a group applies to all its settings, unless a setting has a mark of its own. `InHelp` is a third kind: the
commands whose --help lists a setting.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shared.settings.names import flat_settings, nested_model

Mark = TypeVar("Mark", bound=Enum)


class Travel(Enum):
    """Where a setting goes. Without a mark: to trackers and reports, but not to workers.

    PUBLISHED, NAME and TEXT mark settings that the trainer publishes with its weights, for workers without a
    configuration file of the run. Everyone who may publish weights chooses the values. So a worker accepts only what
    cannot name code, a file or a host: numbers, booleans and choices (Literal). It refuses text, unless the setting
    itself is marked NAME or TEXT.
    """

    PUBLISHED = "published"
    NAME = "name"
    """A name from our registries is accepted; `module:name` and URLs are refused."""
    TEXT = "text"
    """Any text is accepted, since it is only used as text."""
    LOCAL = "local"
    """Never published, although the rest of its section is: it concerns the worker's machine."""
    PRIVATE = "private"
    """Goes nowhere: addresses, credentials, and settings that do not describe the run."""


class Resume(Enum):
    """Whether --resume may change a setting. Without a mark it may, and the run prints the change."""

    FIXED = "fixed"
    """It decides what is sampled, how that is judged, or which data a step sees. Batches of the run's earlier life wait
    in the queue and must stay right."""
    FREE = "free"
    """It decides only how much is computed at once, or for how long: it may change, although its group is FIXED."""
    NOT_COMPARED = "not compared"
    """The directory that the earlier settings were found in, or a secret."""
    NOT_KEPT = "not kept"
    """It belongs to one process: config.toml does not keep it."""


@dataclass(frozen=True)
class Change:
    """A setting whose value differs from that of the run's earlier life; as JSON types. allowed: whether --resume may
    change it."""

    name: str
    before: Any
    after: Any
    allowed: bool

    def __str__(self) -> str:
        return f"{self.name}: {_short(self.before)} -> {_short(self.after)}"


def find_mark(info: FieldInfo, kind: type[Mark]) -> Mark | None:
    return next((mark for mark in info.metadata if isinstance(mark, kind)), None)


def marked(cls: type[BaseModel], *marks: Enum) -> set[str]:
    """Names of a command's settings and groups that have one of these marks."""
    return {name for name, info in cls.model_fields.items() if set(marks) & {find_mark(info, type(m)) for m in marks}}


def _innermost(cls: type[BaseModel], name: str, kind: type[Mark]) -> Mark | None:
    """The mark of the setting with this dotted name, or of its innermost group that has one."""
    mark = None
    for part in name.split("."):
        info = cls.model_fields.get(part)
        if info is None:  # a key of a table whose keys are free
            break
        mark = find_mark(info, kind) or mark
        cls = nested_model(info) or BaseModel
    return mark


def changes(before: Mapping[str, Any], config: BaseModel) -> list[Change]:
    """The settings that differ, in the order of the command's settings.

    before: the tables of the earlier life's config.toml, where None is left out. A setting that it does not have
    had its default.
    """
    cls = type(config)
    earlier = compared_settings(before, cls)
    was, now = default_settings(cls) | earlier, compared_settings(settings_as_json(config), cls)
    # A default that is None stands for a setting that was left out; a table of free keys has no default.
    names = [*now, *(name for name in earlier if name not in now)]
    return [
        Change(name, was.get(name), now.get(name), allowed=_innermost(cls, name, Resume) is not Resume.FIXED)
        for name in names
        if not _same(was.get(name), now.get(name))
    ]


def default_settings(cls: type[BaseModel]) -> dict[str, Any]:
    """The defaults of a command by their dotted names. A setting that has none is left out."""
    return compared_settings(settings_as_json(cls.model_construct()), cls)


def public_settings(tables: Mapping[str, Any], cls: type[BaseModel]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings in nested tables, and the command's defaults, by their dotted names; without private ones."""
    given, defaults = (
        {name: value for name, value in settings.items() if _innermost(cls, name, Travel) is not Travel.PRIVATE}
        for settings in (compared_settings(tables, cls), default_settings(cls))
    )
    return given, defaults


def compared_settings(tables: Mapping[str, Any], cls: type[BaseModel]) -> dict[str, Any]:
    """Nested tables by dotted names, without the settings that --resume does not compare."""
    left_out = marked(cls, Resume.NOT_COMPARED, Resume.NOT_KEPT)
    return {name: value for name, value in flat_settings(tables).items() if name not in left_out}


def settings_as_json(config: BaseModel) -> dict[str, Any]:
    left_out = marked(type(config), Resume.NOT_COMPARED, Resume.NOT_KEPT)
    return json.loads(config.model_dump_json(exclude=left_out, warnings=False))


def _same(before: Any, after: Any) -> bool:
    """Whether two values mean the same: also two paths that lead to the same file."""
    if isinstance(before, str) and isinstance(after, str) and before != after:
        paths = Path(before), Path(after)
        return all(path.exists() for path in paths) and paths[0].samefile(paths[1])
    return before == after


def _short(value: Any) -> str:
    text = "not given" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
