"""Builds the settings of a command from all their sources, or says in a line why it cannot."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, InitSettingsSource, SettingsConfigDict, SettingsError

from shared.errors import UserError
from shared.settings.command_line import command_line
from shared.settings.files import EarlierLife, EarlierLifeSource, FileSource, own_fields
from shared.settings.names import setting_names
from shared.settings.refusals import explain, explain_unparsed
from shared.settings.suggestions import NO_HINTS, Hints, explain_unknown

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
    file_schema: type[BaseModel] | None = None,
    presets: Mapping[str, PresetSettings] | None = None,
    earlier_life: EarlierLife = lambda said: None,
    essential: Sequence[str] = (),
    hints: Hints = NO_HINTS,
) -> Settings:
    """Reads `cls` from the arguments, the environment, the file that `config` names, and the run's earlier life.

    On an error it prints the reason and exits with status 2.
    schema: what the environment may hold: the settings of every command. file_schema: what the file may hold; by
    default the same. The command takes its own settings from both.
    presets: by name, for classes with a field `preset`. A preset's value applies where no other source sets one.
    essential: dotted names of the settings that --help lists; --help-all has all.
    """
    try:
        _refuse_unknown_environment(cls, schema, hints)
        sources = (
            command_line(cls, arguments, prog, essential, hints),
            EnvSettingsSource(cls),
            FileSource(cls, file_schema or schema, hints),
            EarlierLifeSource(cls, earlier_life, prog),
            *((_PresetSource(cls, presets),) if presets else ()),
        )
        return cls(_build_sources=(sources, {}))
    except ValidationError as error:
        message = explain(error, cls, hints)
    except SettingsError as error:
        message = explain_unparsed(error)
    except (OSError, ValueError) as error:
        message = str(error)
    print("\n".join(f"{prog}: {line}" for line in message.splitlines()), file=sys.stderr)
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
        sources = (InitSettingsSource(cls, dict(values)), FileSource(cls, cls, hints), _PresetSource(cls, presets))
        return cls(_build_sources=(sources, {}))
    except ValidationError as error:
        raise UserError(explain(error, cls, hints)) from None
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from None


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
