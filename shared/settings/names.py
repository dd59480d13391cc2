"""Names of settings: `loss.beta` is the field `beta` of the model of the field `loss`. Suggestions for wrong names."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

Mark = TypeVar("Mark")


@dataclass(frozen=True)
class InHelp:
    """Marks a setting that --help lists, in an annotation. commands: whose --help, separated by spaces; by default that
    of every command with this setting. --help-all lists all settings."""

    commands: str = ""


@dataclass(frozen=True)
class Verbatim:
    """Marks a list of texts that the command line takes as they stand, with their spaces, commas and backslashes."""


def find_marks(model: type[BaseModel], kind: type[Mark]) -> Iterator[tuple[str, Mark]]:
    """Dotted names of the settings with a mark of this kind in their annotation, and the marks."""
    for name, info in model.model_fields.items():
        yield from ((name, mark) for mark in info.metadata if isinstance(mark, kind))
        if nested := nested_model(info):
            yield from ((f"{name}.{inner}", mark) for inner, mark in find_marks(nested, kind))


def names_in_help(model: type[BaseModel], command: str) -> set[str]:
    """Dotted names of the settings that --help of a command lists; empty if none is marked."""
    return {name for name, mark in find_marks(model, InHelp) if not mark.commands or command in mark.commands.split()}


def flat_settings(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables by dotted names: {"a": {"b": 1}} -> {"a.b": 1}"""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        flat |= flat_settings(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def nested_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as nested tables, without nulls, which TOML lacks: {"a.b": 1, "a.c": None} -> {"a": {"b": 1}}"""
    tables: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        table = tables
        for key in path:
            table = table.setdefault(key, {})
        if value is not None:
            table[last] = value
    return tables


def nested_model(info: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a group of settings, also of `Group | None`; None for a plain setting."""
    either = get_args(info.annotation) if get_origin(info.annotation) in (Union, UnionType) else ()
    return _model_in((info.annotation, *either))


def setting_names(model: type[BaseModel]) -> list[str]:
    """Dotted names of all settings, and of the groups that hold them."""
    names = []
    for name, info in model.model_fields.items():
        nested = nested_model(info)
        names += [name, *(f"{name}.{inner}" for inner in setting_names(nested))] if nested else [name]
    return names


def unknown_names(values: Mapping[str, Any], model: type[BaseModel]) -> Iterator[str]:
    """Dotted names in nested tables that are no settings of the model; `data.mixture.0.x` in a list of groups."""
    for key, value in values.items():
        info = model.model_fields.get(key)
        group = _group(info)
        if info is None:
            yield key
        elif group and isinstance(value, Mapping):
            yield from (f"{key}.{name}" for name in unknown_names(value, group))
        elif group and isinstance(value, list):
            for place, item in enumerate(value):
                inner = unknown_names(item, group) if isinstance(item, Mapping) else ()
                yield from (f"{key}.{place}.{name}" for name in inner)


def without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The nested tables without the setting of this dotted name. A setting inside a list takes its list along."""
    key, _, rest = name.partition(".")
    inner = values.get(key)
    if rest and isinstance(inner, Mapping):
        return {**values, key: without(inner, rest)}
    return {other: value for other, value in values.items() if other != key}


def group_at(model: type[BaseModel], names: tuple[str, ...]) -> type[BaseModel] | None:
    """The model of the group of these names; None where they lead to no group."""
    for name in names:
        inner = _group(model.model_fields.get(name))
        if inner is None:
            return None
        model = inner
    return model


def is_secret(info: FieldInfo) -> bool:
    return SecretStr in (info.annotation, *get_args(info.annotation))


def _group(info: FieldInfo | None) -> type[BaseModel] | None:
    """The model of a group of settings, or of those in a list of groups."""
    return _model_in((info.annotation, *_arguments(info.annotation))) if info else None


def _arguments(annotation: Any) -> Iterator[Any]:
    """The types that a type is made of: of `list[Group] | None` the list and the group."""
    for argument in get_args(annotation):
        yield argument
        yield from _arguments(argument)


def _model_in(kinds: Iterable[Any]) -> type[BaseModel] | None:
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


# How a source writes a dotted name: `loss.beta` is `--loss.beta` or POLICY_TRAINER_LOSS__BETA.
Spell = Callable[[str], str]

_SUGGESTIONS = 3


@dataclass(frozen=True)
class Hints:
    """What a program knows about names that are not settings of the command at hand.

    commands: each command's settings. renamed: names in another program -> ours, dotted. absent: names in another
    program -> why there is none here, and what to do instead. listed: where all settings are.
    """

    commands: Mapping[str, type[BaseModel]] = field(default_factory=dict)
    renamed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    listed: str = "--help-all lists all"


NO_HINTS = Hints()


def explain_unknown(name: str, known: list[str], hints: Hints, spell: Spell) -> str:
    """The end of a sentence about a dotted name that is none of the known ones."""
    # Another program's `lora_dropout` and `use_dora` are also looked for as our `lora.dropout` and `lora.use_dora`.
    spellings = dict.fromkeys((name, name.replace(".", "_"), _last(name)))
    if absent := [hints.absent[spelled] for spelled in spellings if spelled in hints.absent]:
        return absent[0]
    owners = [f"`{command}`" for command, other in hints.commands.items() if name in setting_names(other)]
    renamed = [ours for spelled in spellings for ours in hints.renamed.get(spelled, ()) if ours in known]
    meant = renamed or _namesakes(name, known) or ([] if owners else _similar(name, known))
    answers = [f"it belongs to {', '.join(owners)}"] if owners else []
    answers += [_did_you_mean(meant, spell)] if meant else []
    return "; ".join(answers) or hints.listed


def _namesakes(name: str, known: list[str]) -> list[str]:
    """Settings of the same name in other groups."""
    if name in known:  # written with the wrong dashes
        return [name]
    return [other for other in known if _last(other) == _last(name)][:_SUGGESTIONS]


def _similar(name: str, known: list[str]) -> list[str]:
    """The setting of a similar name, or those of a similar name in other groups."""
    if near := get_close_matches(name, known, n=1):
        return near
    last = get_close_matches(_last(name), {_last(other) for other in known}, n=1)
    return [other for other in known if _last(other) in last][:_SUGGESTIONS]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _did_you_mean(names: list[str], spell: Spell) -> str:
    *others, last = (spell(name) for name in names)
    return f"did you mean {' or '.join([', '.join(others), last] if others else [last])}?"
