"""Settings from TOML files: the one that `config` names, and the one that an earlier process of the run wrote."""

import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_settings import BaseSettings, TomlConfigSettingsSource

from shared.errors import printable
from shared.settings.names import Hints, explain_unknown, group_at, setting_names, unknown_names, without

# The file that an earlier process of the run wrote, given the values of stronger sources; None if there is none.
FindEarlier = Callable[[Mapping[str, Any]], Path | None]


class FileSource(TomlConfigSettingsSource):
    """The TOML file that a stronger source names as `config`. It may hold the settings of `schema`, and no others."""

    def __init__(self, cls: type[BaseSettings], schema: type[BaseModel], hints: Hints) -> None:
        super().__init__(cls, toml_file=None)
        self._schema = schema
        self._hints = hints

    def __call__(self) -> dict[str, Any]:
        if self.current_state.get("config") is None:
            return {}
        path = Path(self.current_state["config"])
        values = _read_config(path)
        for name in unknown_names(values, self._schema):
            raise ValueError(f"{path}: {name} is not a setting here; {self._meant(name)}")
        return own_fields(values, self.settings_cls)

    def _meant(self, name: str) -> str:
        """The name that was probably meant. Inside a list, as in `data.mixture.0.x`, it is one of the same group."""
        *path, last = name.split(".")
        names = tuple(part for part in path if not part.isdigit())
        group = group_at(self._schema, names)
        if group is None or len(names) == len(path):
            return explain_unknown(name, setting_names(self._schema), self._hints, str)
        prefix = ".".join([*path, ""])
        return explain_unknown(last, setting_names(group), self._hints, lambda known: prefix + known)


class EarlierRun(TomlConfigSettingsSource):
    """The settings that an earlier process of the run wrote. Those that this version does not know are left out."""

    def __init__(self, cls: type[BaseSettings], find: FindEarlier, prog: str) -> None:
        super().__init__(cls, toml_file=None)
        self._find = find
        self._prog = prog

    def __call__(self) -> dict[str, Any]:
        path = self._find(self.current_state)
        if path is None:
            return {}
        values, unknown = read_known(path, self.settings_cls)
        for name in unknown:
            line = f"{self._prog}: {path}: {name} is not a setting of this version and is ignored"
            print(printable(line), file=sys.stderr)
        return values


def read_known(path: Path, cls: type[BaseModel]) -> tuple[dict[str, Any], list[str]]:
    """A file's settings as far as `cls` knows them, and the dotted names of the others."""
    values = read_toml(path)
    unknown = list(unknown_names(values, cls))
    for name in unknown:
        values = without(values, name)
    return values, unknown


def _read_config(path: Path) -> dict[str, Any]:
    """The tables of the file that `config` names. Raises ValueError where it cannot be read or is not TOML."""
    try:
        return read_toml(path)
    except OSError as error:
        raise ValueError(f"config: {path} cannot be read: {error.strerror}; give a TOML file of settings") from None
    except ValueError as error:
        raise ValueError(f"config: {error}; a line is NAME = VALUE, with texts in quotes, or [GROUP]") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ValueError for what is not TOML, OSError for what cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None


def own_fields(values: Mapping[str, Any], cls: type[BaseModel]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key in cls.model_fields}
