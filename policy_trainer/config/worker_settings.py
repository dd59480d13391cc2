"""The settings that workers elsewhere get from the trainer, with its published weights."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from policy_trainer.config.commands import RolloutConfig, RunConfig
from policy_trainer.config.functions import is_function
from policy_trainer.config.marks import Travel, find_mark
from shared.settings.names import group_at

# The text that a worker accepts in a published setting with this mark; none in others.
_ACCEPTED: Mapping[Travel | None, str] = {Travel.NAME: r"[\w/-]+", Travel.TEXT: r"(?s:.*)"}


def worker_settings(config: RunConfig) -> dict[str, Any]:
    """As JSON. What is None is left out."""
    settings = json.loads(config.model_dump_json(exclude_none=True))
    if Path(config.model).is_dir():
        settings["model"] = str(Path(config.model).resolve())
    if is_function(settings.get("loss", {}).get("advantage", "")):
        del settings["loss"]["advantage"]  # no worker calls it
    return travelling_settings(settings, type(config))


def travelling_settings(settings: Mapping[str, Any], model: type[BaseModel] = RolloutConfig) -> dict[str, Any]:
    """The settings in these nested tables that are published for workers.

    `model` and `revision` are among them only if adapters are trained: otherwise the published weights are the model.
    """
    travelling = _travelling(settings, model, inside=False)
    if not trains_adapters(settings):
        travelling = {name: value for name, value in travelling.items() if name not in ("model", "revision")}
    return travelling


def refused_settings(
    settings: Mapping[str, Any], model: type[BaseModel] = RolloutConfig, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yields dotted names and values of published settings that could name code, a file or a host.

    A setting inside a list is named like `data.mixture.0.path`.
    """
    for name, value in settings.items():
        group, info = group_at(model, (name,)), model.model_fields.get(name)
        if group and isinstance(value, Mapping):
            yield from refused_settings(value, group, f"{prefix}{name}.")
        elif group and isinstance(value, list):
            for place, item in enumerate(value):
                if isinstance(item, Mapping):  # validation refuses other items
                    yield from refused_settings(item, group, f"{prefix}{name}.{place}.")
        elif info is None or not _names_nothing(info, value):
            yield f"{prefix}{name}", value


def trains_adapters(settings: Mapping[str, Any]) -> bool:
    lora = settings.get("lora")
    return isinstance(lora, Mapping) and bool(lora.get("rank"))


def _travelling(settings: Mapping[str, Any], model: type[BaseModel], *, inside: bool) -> dict[str, Any]:
    """inside: whether `settings` are those of a section that is published."""
    kept: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        value, travel = settings.get(name), find_mark(info, Travel)
        if value is None or travel in (Travel.LOCAL, Travel.PRIVATE):
            continue
        travels, group = inside or travel is not None, group_at(model, (name,))
        if group and isinstance(value, Mapping):
            value = _travelling(value, group, inside=travels)
            travels = bool(value)
        if travels:
            kept[name] = value
    return kept


def _names_nothing(info: FieldInfo, value: Any) -> bool:
    """Whether a published value cannot name code, a file or a host, judged by its type or the setting's mark."""
    pattern = _ACCEPTED.get(find_mark(info, Travel))
    return _has_no_text(info.annotation) or all(
        pattern is not None and re.fullmatch(pattern, text, re.ASCII) for text in _texts(value)
    )


def _has_no_text(kind: Any) -> bool:
    """Whether values of this type contain no text other than the choices that the type lists."""
    if get_origin(kind) is Literal:
        return True
    parts = get_args(kind)[:1] if get_origin(kind) is Annotated else get_args(kind)
    return all(map(_has_no_text, parts)) if parts else kind in (int, float, bool, NoneType)


def _texts(value: Any) -> Iterator[str]:
    """All strings in a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from _texts(item)
