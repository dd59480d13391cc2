"""How both command lines are configured: a preset, one TOML file, the environment, the command line, strongest last.

One pydantic model describes them all. Unknown keys and impossible values are refused with the field's name.
"""

import os
import sys
import tomllib
from argparse import ArgumentParser
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
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

Settings = TypeVar("Settings", bound=BaseSettings)

# Precision of a model's weights; auto takes what the model was saved in.
Dtype = Literal["float32", "bfloat16", "float16", "auto"]

# What was said by stronger sources, as nested tables -> the settings of a preset.
SettingsBeside = Callable[[Mapping[str, Any]], Mapping[str, Any]]

NESTED_DELIMITER = "__"


def settings_config(env_prefix: str) -> SettingsConfigDict:
    """The one configuration of every settings class."""
    return SettingsConfigDict(
        env_prefix=env_prefix,
        env_nested_delimiter=NESTED_DELIMITER,
        extra="forbid",
        allow_inf_nan=False,  # infinity passes every lower bound, and no number here has a use for it
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        use_attribute_docstrings=True,
        validate_default=True,
        hide_input_in_errors=True,  # which may hold a password
    )


def load_settings(
    cls: type[Settings],
    arguments: list[str],
    *,
    prog: str,
    schema: type[BaseModel],
    presets: Mapping[str, SettingsBeside] | None = None,
) -> Settings:
    """Reads `cls` from `--config FILE`, the environment and the arguments; exits with status 2 and a reason on errors.

    schema: the model of the whole file. A command takes its own fields from a file that may hold those of others.
    presets: settings by name, for classes with the field `preset`, which says whose hold where nobody says otherwise.
    Each is a function of all that was said, since some go only with what the same preset says of others.
    """
    prefix = cls.model_config.get("env_prefix", "")
    try:
        file = _said_early("config", arguments, prefix, prog)
        _refuse_secrets(arguments, cls, prefix)
        _refuse_unknown_environment(prefix, schema)
        from_file = _read_file(Path(file), cls, schema) if file is not None else {}
        preset = None
        if presets and "preset" in cls.model_fields:
            name = _said_early("preset", arguments, prefix, prog)
            preset = _preset(from_file.get("preset") if name is None else name, presets)
        return _with_sources(
            cls,
            lambda loaded: (
                CliSettingsSource(loaded, cli_prog_name=prog, cli_parse_args=arguments),
                EnvSettingsSource(loaded),
                InitSettingsSource(loaded, from_file),
                *([_PresetSource(loaded, preset)] if preset else []),
            ),
        )()
    except ValidationError as error:
        sys.exit(_explain(error, cls, prog))
    except SettingsError as error:
        print(f"{prog}: {error}: {_form_of_lists(str(error))}", file=sys.stderr)
        sys.exit(2)
    except (OSError, ValueError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        sys.exit(2)


def from_values(cls: type[Settings], **values: Any) -> Settings:
    """Settings from these values and defaults alone: the environment has no say in what a program decides."""

    return _with_sources(cls, lambda loaded: (InitSettingsSource(loaded, values),))()


class _PresetSource(PydanticBaseSettingsSource):
    """The weakest: it is asked last, when all that was said is known."""

    def __init__(self, cls: type[BaseSettings], preset: SettingsBeside) -> None:
        super().__init__(cls)
        self._preset = preset

    def __call__(self) -> dict[str, Any]:
        return _own_fields(self._preset(self.current_state), self.settings_cls)

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError("a preset gives all of its settings at once")


def _with_sources(
    cls: type[Settings], sources: Callable[[type[BaseSettings]], tuple[PydanticBaseSettingsSource, ...]]
) -> type[Settings]:
    """The same settings, read from these sources and no others, the strongest first."""

    class Loaded(cls):  # type: ignore[valid-type,misc]
        __doc__ = cleandoc(cls.__doc__ or "")  # --help prints it as it stands

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *_: Any, **__: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return sources(settings_cls)

    Loaded.__name__ = cls.__name__
    return Loaded  # type: ignore[return-value]


def _said_early(name: str, arguments: list[str], prefix: str, prog: str) -> str | None:
    """An option that says where others come from, by the command line or the environment."""
    environment = {name.upper(): value for name, value in os.environ.items()}.get(f"{prefix}{name}".upper())
    parser = ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", default=environment or None)
    return getattr(parser.parse_known_args(arguments)[0], name)


def _preset(name: Any, presets: Mapping[str, SettingsBeside]) -> SettingsBeside | None:
    if not isinstance(name, str):  # refused later, unless nothing was said
        return None
    if name not in presets:
        raise ValueError(f"preset: there is no {name!r}; there are {', '.join(presets)}")
    return presets[name]


def _own_fields(values: Mapping[str, Any], cls: type[BaseModel]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key in cls.model_fields}


def _read_file(path: Path, cls: type[BaseSettings], schema: type[BaseModel]) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_bytes().decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    _refuse_unknown_keys(values, schema, path, "")
    return _own_fields(values, cls)


def _refuse_unknown_keys(values: dict[str, Any], model: type[BaseModel], path: Path, table: str) -> None:
    for key, value in values.items():
        if key not in model.model_fields:
            known = ", ".join(sorted(model.model_fields))
            raise ValueError(f"{path}: {table}{key} is not a setting; known are {known}")
        nested = _nested_model(model.model_fields[key])
        if nested and isinstance(value, dict):
            _refuse_unknown_keys(value, nested, path, f"{table}{key}.")


def _refuse_unknown_environment(prefix: str, schema: type[BaseModel]) -> None:
    known = {(prefix + name).upper() for name in _environment_names(schema)}
    for name in os.environ:
        if name.upper().startswith(prefix.upper()) and name.upper() not in known:
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


def _required(info: FieldInfo) -> list[str]:
    """Names of the fields without a default of a group."""
    nested = _nested_model(info)
    return [name for name, field in nested.model_fields.items() if field.is_required()] if nested else []


def _refuse_secrets(arguments: list[str], cls: type[BaseModel], prefix: str) -> None:
    """A command line is shown to everyone who lists processes."""
    given = {argument.partition("=")[0] for argument in arguments}
    for name, info in cls.model_fields.items():
        option = "--" + name.replace("_", "-")
        if _is_secret(info) and option in given:
            variable = (prefix + name).upper()
            raise ValueError(f"{option}: a command line is no place for a secret; set {variable} in the environment")


def _is_secret(info: FieldInfo) -> bool:
    return SecretStr in (info.annotation, *get_args(info.annotation))


def _form_of_lists(message: str) -> str:
    """What would be right where a list or a group cannot be read at all."""
    # A list of the command line is made JSON before it is read as such; JSON has neither infinity nor NaN.
    if "CliSettingsSource" in message:
        return "numbers must be finite"
    return 'there lists and groups are JSON, as in \'["a", "b"]\''


def _explain(error: ValidationError, cls: type[BaseModel], prog: str) -> int:
    """What was given is repeated, unless the field's `repr=False` says that there may be a secret in it."""
    for item in error.errors():
        message = item["msg"].removeprefix("Value error, ")
        field = cls.model_fields.get(str(item["loc"][0])) if item["loc"] else None
        # Of a group that is missing what nobody can do without is.
        wanted = _required(field) if field and item["type"] == "missing" and len(item["loc"]) == 1 else ()
        where = ".".join(str(part) for part in (*item["loc"], *wanted[:1]))
        shown = not isinstance(item["input"], dict) and not (field and (not field.repr or _is_secret(field)))
        got = f", got {item['input']!r}" if shown else ""
        # A check of several fields together has no place of its own, or only their group's: its message names them.
        named = not where or message.startswith(f"{where}.")
        print(f"{prog}: {message}" if named else f"{prog}: {where}: {message}{got}", file=sys.stderr)
    return 2
