"""Explains invalid values: a line for each, with the setting's name as it was written."""

from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from shared.settings.names import group_at, is_secret, nested_model, setting_names
from shared.settings.suggestions import Hints, explain_unknown


def explain(error: ValidationError, cls: type[BaseModel], hints: Hints) -> str:
    """A line for each invalid value. It repeats the value, unless that may hold a secret (`repr=False`)."""
    return "\n".join(_explain(item, cls, hints) for item in error.errors())


def _explain(item: Any, cls: type[BaseModel], hints: Hints) -> str:
    message = item["msg"].removeprefix("Value error, ")
    field = cls.model_fields.get(str(item["loc"][0])) if item["loc"] else None
    location = [str(part) for part in item["loc"]]
    if field and item["type"] == "missing" and len(location) == 1:
        location += _required(field)[:1]  # a whole group is missing: name the field that has no default
    where = ".".join(location)
    if item["type"] == "extra_forbidden":
        return f"{where} is not a setting; {_meant(item['loc'], cls, hints)}"
    shown = not isinstance(item["input"], dict) and not (field and (not field.repr or is_secret(field)))
    got = f", got {item['input']!r}" if shown else ""
    # A check of several fields has no location, or only their group's: its message names them.
    named = not where or message.startswith(f"{where}.")
    return message if named else f"{where}: {message}{got}"


def _meant(location: tuple[int | str, ...], cls: type[BaseModel], hints: Hints) -> str:
    *path, name = (str(part) for part in location)
    group = group_at(cls, tuple(part for part in path if not part.isdigit()))
    return explain_unknown(name, setting_names(group or cls), hints, lambda known: ".".join([*path, known]))


def form_of_lists(message: str) -> str:
    """How to write a list or a group that could not be parsed."""
    # pydantic-settings makes JSON of the command line's lists, and JSON has neither infinity nor NaN.
    if "CliSettingsSource" in message:
        return "numbers must be finite"
    return 'write lists and groups as JSON, as in \'["a", "b"]\''


def _required(info: FieldInfo) -> list[str]:
    """Names of a group's fields that have no default."""
    nested = nested_model(info)
    return [name for name, field in nested.model_fields.items() if field.is_required()] if nested else []
