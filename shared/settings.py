"""Settings of a command, from a preset, one TOML file, the environment and the command line; later ones override.

One pydantic model describes all four. Unknown keys and invalid values are refused with the field's name.
"""

import os
import sys
import tomllib
from collections.abc import Callable, Mapping
from inspect import cleandoc
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    InitSettingsSource,
    NoDecode,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

Settings = TypeVar("Settings", bound=BaseSettings)

# Precision of a model's weights; auto takes what the model was saved in.
Dtype = Literal["float32", "bfloat16", "float16", "auto"]

# Returns a preset's settings, as nested tables, from the values that other sources set.
PresetSettings = Callable[[Mapping[str, Any]], Mapping[str, Any]]

NESTED_DELIMITER = "__"


def settings_config(env_prefix: str) -> SettingsConfigDict:
    """The one configuration of every settings class."""
    return SettingsConfigDict(
        env_prefix=env_prefix,
        env_nested_delimiter=NESTED_DELIMITER,
        extra="forbid",
        allow_inf_nan=False,  # infinity passes every lower bound, and no setting has a use for it
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        use_attribute_docstrings=True,
        validate_default=True,
        hide_input_in_errors=True,  # the input may hold a password
    )


def load_settings(
    cls: type[Settings],
    arguments: list[str],
    *,
    prog: str,
    schema: type[BaseModel],
    presets: Mapping[str, PresetSettings] | None = None,
) -> Settings:
    """Reads `cls` from the arguments, the environment and the file that `config` names.

    On an error it prints the reason and exits with status 2.
    schema: the model of the whole file. A command takes its own fields from a file that may hold other commands' too.
    presets: by name, for classes with a field `preset`. A preset's value applies where no other source sets one.
    """
    try:
        _refuse_unknown_environment(cls, schema)
        command_line = _command_line(cls, arguments, prog)
        preset = (_PresetSource(cls, presets),) if presets else ()
        sources = (command_line, EnvSettingsSource(cls), _FileSource(cls, schema), *preset)
        return cls(_build_sources=(sources, {}))
    except ValidationError as error:
        message = _explain(error, cls)
    except SettingsError as error:
        message = f"{error}: {_form_of_lists(str(error))}"
    except (OSError, ValueError) as error:
        message = str(error)
    print("\n".join(f"{prog}: {line}" for line in message.splitlines()), file=sys.stderr)
    sys.exit(2)


def from_values(cls: type[Settings], **values: Any) -> Settings:
    """Settings from these values and the defaults, independent of the environment."""
    return cls(_build_sources=((InitSettingsSource(cls, values),), {}))


class _FileSource(TomlConfigSettingsSource):
    """The TOML file that a stronger source names as `config`."""

    def __init__(self, cls: type[BaseSettings], schema: type[BaseModel]) -> None:
        super().__init__(cls, toml_file=None)
        self._schema = schema

    def __call__(self) -> dict[str, Any]:
        if self.current_state.get("config") is None:
            return {}
        path = Path(self.current_state["config"])
        try:
            values = self._read_file(path)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not TOML: {error}") from None
        _refuse_unknown_keys(values, self._schema, path)
        return _own_fields(values, self.settings_cls)


class _PresetSource(InitSettingsSource):
    """The preset that a stronger source names as `preset`. It is read last, since its values depend on the others."""

    def __init__(self, cls: type[BaseSettings], presets: Mapping[str, PresetSettings]) -> None:
        super().__init__(cls, {})
        self._presets = presets

    def __call__(self) -> dict[str, Any]:
        name = self.current_state.get("preset")
        if not isinstance(name, str):  # not set, or validation will refuse it
            return {}
        if name not in self._presets:
            raise ValueError(f"preset: there is no {name!r}; there are {', '.join(self._presets)}")
        return _own_fields(self._presets[name](self.current_state), self.settings_cls)


def _command_line(cls: type[BaseSettings], arguments: list[str], prog: str) -> CliSettingsSource:
    """Refuses secrets. A list that is annotated with `NoDecode` keeps its strings unchanged, commas included."""
    source = CliSettingsSource(cls, cli_prog_name=prog)
    source.root_parser.description = cleandoc(cls.__doc__ or "")
    given = source.root_parser.parse_args(arguments)
    for name, info in cls.model_fields.items():
        if name in given and _is_secret(info):
            variable = f"{cls.model_config.get('env_prefix', '')}{name}".upper()
            raise ValueError(
                f"--{name.replace('_', '-')}: everyone who lists processes can read a command line; "
                f"set {variable} in the environment"
            )
        if name in given and NoDecode in info.metadata:
            texts = ("--" if text == [] else text for text in getattr(given, name))  # argparse drops `--` until 3.12
            setattr(given, name, tuple(texts))  # pydantic-settings would join a list by commas
    return source(parsed_args=given)


def _own_fields(values: Mapping[str, Any], cls: type[BaseModel]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key in cls.model_fields}


def _refuse_unknown_keys(values: dict[str, Any], model: type[BaseModel], path: Path, table: str = "") -> None:
    for key, value in values.items():
        if key not in model.model_fields:
            known = ", ".join(sorted(model.model_fields))
            raise ValueError(f"{path}: {table}{key} is not a setting; known are {known}")
        nested = _nested_model(model.model_fields[key])
        if nested and isinstance(value, dict):
            _refuse_unknown_keys(value, nested, path, f"{table}{key}.")


def _refuse_unknown_environment(cls: type[BaseSettings], schema: type[BaseModel]) -> None:
    prefix = cls.model_config.get("env_prefix", "").upper()
    known = {prefix + name.upper() for name in _environment_names(schema)}
    for name in os.environ:
        if name.upper().startswith(prefix) and name.upper() not in known:
            raise ValueError(f"the environment variable {name} is not a setting; see --help for those that are")


def _environment_names(model: type[BaseModel], path: str = "") -> list[str]:
    names = []
    for name, info in model.model_fields.items():
        names.append(path + name)
        nested = _nested_model(info)
        if nested:
            names += _environment_names(nested, path + name + NESTED_DELIMITER)
    return names


def _nested_model(info: FieldInfo) -> type[BaseModel] | None:
    kinds = (info.annotation, *get_args(info.annotation))  # also that of `Nested | None`
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _is_secret(info: FieldInfo) -> bool:
    return SecretStr in (info.annotation, *get_args(info.annotation))


def _form_of_lists(message: str) -> str:
    """How to write a list or a group that could not be parsed."""
    # pydantic-settings makes JSON of the command line's lists, and JSON has neither infinity nor NaN.
    if "CliSettingsSource" in message:
        return "numbers must be finite"
    return 'write lists and groups as JSON, as in \'["a", "b"]\''


def _explain(error: ValidationError, cls: type[BaseModel]) -> str:
    """A line for each invalid value. It repeats the value, unless that may hold a secret (`repr=False`)."""
    lines = []
    for item in error.errors():
        message = item["msg"].removeprefix("Value error, ")
        field = cls.model_fields.get(str(item["loc"][0])) if item["loc"] else None
        location = [str(part) for part in item["loc"]]
        if field and item["type"] == "missing" and len(location) == 1:
            location += _required(field)[:1]  # a whole group is missing: name the field that has no default
        where = ".".join(location)
        shown = not isinstance(item["input"], dict) and not (field and (not field.repr or _is_secret(field)))
        got = f", got {item['input']!r}" if shown else ""
        # A check of several fields has no location, or only their group's: its message names them.
        named = not where or message.startswith(f"{where}.")
        lines.append(message if named else f"{where}: {message}{got}")
    return "\n".join(lines)


def _required(info: FieldInfo) -> list[str]:
    """Names of a group's fields that have no default."""
    nested = _nested_model(info)
    return [name for name, field in nested.model_fields.items() if field.is_required()] if nested else []
