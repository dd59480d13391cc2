"""Settings in messages, spelled as arguments of GRPO instead of options of the command line."""

import re
from contextlib import suppress
from functools import cache
from typing import Any, get_args

from policy_trainer.config import TrainConfig
from shared.settings.names import group_at, setting_names

# A command in backquotes stays as it is, since it is for a shell.
_OPTION = re.compile(r"`[^`]*`|(?<![\w-])--(?P<no>no-)?(?P<name>[a-z][\w.-]*\w)(?: (?P<value>''|[\w.+-]*\w))?")


def in_python(text: str) -> str:
    """`--data.prompt-style plain` becomes `data={'prompt_style': 'plain'}`, `--resume` becomes `resume=True`, and an
    option without a value its dotted name."""
    return _OPTION.sub(_spelled, text)


def _spelled(match: re.Match[str]) -> str:
    name = _names().get(match["name"] or "")
    if name is None:
        return match[0]
    kind, value = _type_of(name), match["value"]
    rest = f" {value}" if value else ""
    if kind is bool:
        return _argument(name, not match["no"]) + rest
    if value == "''" or value in get_args(kind):
        return _argument(name, value.strip("'"))
    if kind in (int, float) and value:
        with suppress(ValueError):  # a word, or a number of another kind
            return _argument(name, kind(value))
    return name + rest


def _argument(name: str, value: Any) -> str:
    first, *groups = name.split(".")
    for group in reversed(groups):
        value = {group: value}
    return f"{first}={value!r}"


@cache
def _names() -> dict[str, str]:
    """Names of settings by their spelling on the command line."""
    return {name.replace("_", "-"): name for name in setting_names(TrainConfig)}


def _type_of(name: str) -> Any:
    *groups, last = name.split(".")
    model = group_at(TrainConfig, tuple(groups))
    return model.model_fields[last].annotation if model else None
