"""Explains invalid values: a line for each, with the setting's name as it was written."""

import re
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import SettingsError

from shared.settings.command_line import spell_option
from shared.settings.names import group_at, is_secret, nested_model, setting_names
from shared.settings.suggestions import Hints, explain_unknown

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
    if field and item["type"] == "missing" and len(location) == 1:
        location += _required(field)[:1]  # a whole group is missing: name the field that has no default
    where = ".".join(location)
    message = _message(item, where)
    if item["type"] == "extra_forbidden":
        return f"{where} is not a setting; {_meant(item['loc'], cls, hints)}"
    shown = not isinstance(item["input"], dict | list) and not (field and (not field.repr or is_secret(field)))
    got = f", got {item['input']!r}" if shown else ""
    # A check of several fields has no location, or only their group's: its message names them.
    named = not where or message.startswith(f"{where}.")
    return message if named else f"{where}: {message}{got}"


def _message(item: Any, where: str) -> str:
    """What is wrong, in words of files and command lines: pydantic speaks of dictionaries and instances."""
    kind = item["type"]
    is_table = isinstance(item["input"], dict) and bool(item["loc"])
    if kind == "missing":
        in_a_list = any(isinstance(part, int) for part in item["loc"])
        return "is required" if in_a_list else f"is required: give {spell_option(where)}, or write it in a file"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"is a group of settings: write a table [{where}], or {spell_option(where)}.NAME VALUE"
    if kind == "list_type":
        return f"must be a list: write [[{where}]] above it" if is_table else "must be a list: write [ … ]"
    told = item["msg"].removeprefix("Value error, ")
    own = kind in ("value_error", "assertion_error")
    return f"{told}, not a table: write {where} = VALUE" if is_table and not own else told


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


def _required(info: FieldInfo) -> list[str]:
    """Names of a group's fields that have no default."""
    nested = nested_model(info)
    return [name for name, field in nested.model_fields.items() if field.is_required()] if nested else []
