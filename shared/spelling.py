"""How messages name a setting: as an option of the command line, or as an argument in Python, as the user gave it."""

import json
import os
import shlex
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

# Set in a process whose settings are arguments in Python. A JSON object of those settings whose argument has another
# name: {name of the setting: name of the argument}. Child processes inherit it, since their errors may reach the same
# user.
_VARIABLE = "TANDEM_ARGUMENTS"


@contextmanager
def spelled_in_python(arguments: Mapping[str, str]) -> Generator[None]:
    """Within the block, messages of this process and of its new children name settings as arguments in Python. Inside
    another such block it changes nothing: the user called the outermost one.

    arguments: the names of the arguments that differ from the setting's, by the setting's dotted name.
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
    """How the user writes the setting of this dotted name, and its value if one is given. On the command line
    `--loss.beta`, `--loss.beta 0.5`, `--resume` or `--no-resume`; in Python `loss.beta`, `loss={'beta': 0.5}`,
    `resume=True` or `resume=False`."""
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
