"""The names of a model's settings: `loss.beta` is the field `beta` of the model of the field `loss`."""

from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo


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
        found = _group(model.model_fields.get(name))
        if found is None:
            return None
        model = found
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
