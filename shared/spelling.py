"""How texts name a setting: as the person writes it who gives options to a command, or arguments to Python."""

import json
import os
import shlex
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

# Set in a process that was given Python's arguments: a JSON object {name of a setting: the argument that holds it}, of
# those that have another name. Child processes inherit it, since their errors may reach the same person.
_VARIABLE = "TANDEM_ARGUMENTS"


@contextmanager
def spelled_in_python(arguments: Mapping[str, str]) -> Generator[None]:
    """In the block, texts of this process and of its new children name settings as arguments in Python. Inside another
    such block it changes nothing: the outermost is the one that the person called.

    arguments: those with another name than their setting, by the setting's dotted name.
    """
    if _VARIABLE in os.environ:
        yield
        return
    os.environ[_VARIABLE] = json.dumps({**arguments})
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)


def spell_option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def spell_name(name: str) -> str:
    """The dotted name of a setting, or the name of the argument that holds it."""
    return _arguments().get(name, name)


def spell_setting(name: str, value: Any = None) -> str:
    """A setting of this dotted name, and its value if one is given. On the command line `--loss.beta`,
    `--loss.beta 0.5`, `--resume` or `--no-resume`; in Python `loss.beta`, `loss={'beta': 0.5}`, `resume=True` or
    `resume=False`."""
    if _VARIABLE in os.environ:
        return spell_name(name) if value is None else _argument(spell_name(name), value)
    if isinstance(value, bool):
        return spell_option(name if value else f"no-{name}")
    return spell_option(name) if value is None else f"{spell_option(name)} {shlex.quote(str(value))}"


def _argument(name: str, value: Any) -> str:
    argument, *inner = name.split(".")
    for each in reversed(inner):
        value = {each: value}
    return f"{argument}={value!r}"


def _arguments() -> Mapping[str, str]:
    return json.loads(os.environ.get(_VARIABLE, "{}"))
