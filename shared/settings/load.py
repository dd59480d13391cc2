"""Builds the settings of a command from all their sources, or explains each invalid value in one line."""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from shared.errors import UserError, printable
from shared.settings.command_line import command_line
from shared.settings.files import FileSource, own_fields
from shared.settings.names import NO_HINTS, Hints, explain_unknown, group_at, is_secret, nested_model, setting_names
from shared.spelling import spell_name, spell_setting

# With a line that counts the others, five in all.
_LISTED = 4


def explain(error: ValidationError, cls: type[BaseModel], hints: Hints) -> str:
    """A line for each invalid value, of many the first. It repeats the value, unless that may hold a secret
    (`repr=False`)."""
    items = error.errors()
    more = [f"and {len(items) - _LISTED} more"] if len(items) > _LISTED else []
    return "\n".join([*(_explain(item, cls, hints) for item in items[:_LISTED]), *more])


def _explain(item: Any, cls: type[BaseModel], hints: Hints) -> str:
    field = cls.model_fields.get(str(item["loc"][0])) if item["loc"] else None
    location = [str(part) for part in item["loc"]]
    group = nested_model(field) if field else None
    if group and item["type"] == "missing" and len(location) == 1:  # name the first field that has no default
        location += [name for name, inner in group.model_fields.items() if inner.is_required()][:1]
    where = ".".join(location)
    message = _message(item, where)
    if item["type"] == "extra_forbidden":
        return f"{where} is not a setting; {_meant(item['loc'], cls, hints)}"
    shown = not isinstance(item["input"], dict | list) and not (field and (not field.repr or is_secret(field)))
    got = f", got {item['input']!r}" if shown else ""
    # A check of several fields has no location, or only their group's: its message names them.
    named = not where or message.startswith(f"{where}.")
    return message if named else f"{spell_name(where)}: {message}{got}"


def _message(item: Any, where: str) -> str:
    """What is wrong, in words of files and command lines: pydantic speaks of dictionaries and instances."""
    kind = item["type"]
    is_table = isinstance(item["input"], dict) and bool(item["loc"])
    if kind == "missing":
        in_a_list = any(isinstance(part, int) for part in item["loc"])
        return "is required" if in_a_list else f"is required: give {spell_setting(where)}, or write it in a file"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"is a group of settings: write a table [{where}], or {spell_setting(where)}.NAME VALUE"
    if kind == "list_type":
        return f"must be a list: write [[{where}]] above it" if is_table else "must be a list: write [ … ]"
    message = item["msg"].removeprefix("Value error, ")
    is_ours = kind in ("value_error", "assertion_error")
    return f"{message}, not a table: write {where} = VALUE" if is_table and not is_ours else message


def _meant(location: tuple[int | str, ...], cls: type[BaseModel], hints: Hints) -> str:
    *path, name = (str(part) for part in location)
    group = group_at(cls, tuple(part for part in path if not part.isdigit()))
    return explain_unknown(name, setting_names(group or cls), hints, lambda known: ".".join([*path, known]))


def explain_unparsed(error: SettingsError) -> str:
    """The field of a list or a group that could not be parsed, and how to write it."""
    message = str(error)
    field = re.search(r'field "([^"]+)"|encountered for ([^:]+)', message)
    # pydantic-settings makes JSON of the command line's lists, and JSON has neither infinity nor NaN.
    form = (
        "numbers must be finite"
        if "CliSettingsSource" in message
        else """write lists as JSON, as in '["a", "b"]', and groups as in '{"name": 1}'"""
    )
    return f"{(field[1] or field[2]) if field else message}: {form}"


Settings = TypeVar("Settings", bound=BaseSettings)

# Precision of a model's weights; auto takes what the model was saved in.
Dtype = Literal["float32", "bfloat16", "float16", "auto"]

# Returns a preset's settings, as nested tables, from the values that other sources set.
PresetSettings = Callable[[Mapping[str, Any]], Mapping[str, Any]]

NESTED_DELIMITER = "__"


class Section(BaseModel):
    """A group of settings."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False)


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
    file_schema: type[BaseModel] | None = None,
    weaker: Sequence[PydanticBaseSettingsSource] = (),
    hints: Hints = NO_HINTS,
) -> Settings:
    """Reads `cls` from the arguments, the environment, and the file that `config` names.

    On an error it prints the reason and exits with status 2.
    schema: what the environment may hold: the settings of every command. file_schema: what the file may hold; by
    default the same. The command takes its own settings from both. weaker: further sources, the strongest first, such
    as EarlierRun and PresetSource.
    """
    try:
        _refuse_unknown_environment(cls, schema, hints)
        sources = (
            command_line(cls, arguments, prog, hints),
            EnvSettingsSource(cls),
            FileSource(cls, file_schema or schema, hints),
            *weaker,
        )
        return cls(_build_sources=(sources, {}))
    except ValidationError as error:
        message = explain(error, cls, hints)
    except SettingsError as error:
        message = explain_unparsed(error)
    except (OSError, ValueError) as error:
        message = str(error)
    print("\n".join(f"{prog}: {printable(line)}" for line in message.splitlines()), file=sys.stderr)
    sys.exit(2)


def from_values(cls: type[Settings], **values: Any) -> Settings:
    """Settings from these values and the defaults, independent of the environment."""
    return cls(_build_sources=((InitSettingsSource(cls, values),), {}))


def from_python(
    cls: type[Settings], values: Mapping[str, Any], *, presets: Mapping[str, PresetSettings], hints: Hints
) -> Settings:
    """Settings from these values, the file that `config` names, and the preset. The environment says nothing.

    values: nested groups are dicts. Raises UserError for a wrong name or value.
    """
    try:
        sources = (InitSettingsSource(cls, dict(values)), FileSource(cls, cls, hints), PresetSource(cls, presets))
        return cls(_build_sources=(sources, {}))
    except ValidationError as error:
        raise UserError(explain(error, cls, hints)) from None
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from None


class PresetSource(InitSettingsSource):
    """The preset that a stronger source names as `preset`. It is the weakest source, since its values depend on the
    others. presets: by name."""

    def __init__(self, cls: type[BaseSettings], presets: Mapping[str, PresetSettings]) -> None:
        super().__init__(cls, {})
        self._presets = presets

    def __call__(self) -> dict[str, Any]:
        name = self.current_state.get("preset")
        if not isinstance(name, str):  # not set, or validation will refuse it
            return {}
        if name not in self._presets:
            raise ValueError(f"preset: there is no {name!r}; there are {', '.join(self._presets)}")
        return own_fields(self._presets[name](self.current_state), self.settings_cls)


def _refuse_unknown_environment(cls: type[BaseSettings], schema: type[BaseModel], hints: Hints) -> None:
    prefix = cls.model_config.get("env_prefix", "").upper()
    names = setting_names(schema)
    known = {_spell_variable(name, prefix) for name in names}
    for variable in os.environ:
        if variable.upper().startswith(prefix) and variable.upper() not in known:
            name = variable.upper().removeprefix(prefix).lower().replace(NESTED_DELIMITER, ".")
            meant = explain_unknown(name, names, hints, lambda known: _spell_variable(known, prefix))
            raise ValueError(f"the environment variable {variable} is not a setting; {meant}")


def _spell_variable(name: str, prefix: str) -> str:
    return prefix + name.replace(".", NESTED_DELIMITER).upper()
