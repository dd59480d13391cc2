"""Writes docs/settings-reference.md from the settings' own docstrings: `.venv/bin/python -m tools.settings_page`."""

import re
from argparse import Action
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from inspect import cleandoc
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings

from policy_trainer.config.names import COMMANDS
from ref_server.config import ServeConfig
from shared.settings.command_line import options

PAGE = Path(__file__).parents[1] / "docs" / "settings-reference.md"
_HEAD = """# All settings

What `--help-all` says of each command, on one page. [settings.md](settings.md) says how settings are given: on the
command line, in the environment, or in a TOML file, where `loss.beta` is `beta` in the table `[loss]`. This page is
written from the code: `python -m tools.settings_page`.
"""
_TRAIN = "policy-trainer train"
_DEFAULT = re.compile(r" ?\(default: (.*)\)$")


@cache
def page() -> str:
    others = {f"policy-trainer {name}": cls for name, cls in COMMANDS.items() if name != "train"}
    commands: dict[str, Any] = {_TRAIN: COMMANDS["train"], "ref-server serve": ServeConfig, **others}
    known = {_cells(option) for option in options(commands[_TRAIN])}
    parts = [_HEAD, *(part for name, cls in commands.items() for part in _command(name, cls, known))]
    return "\n".join(parts)


def _command(name: str, cls: type[BaseSettings], of_train: set[tuple[str, ...]]) -> Iterator[str]:
    """of_train: the settings of `train`, which other commands' parts do not repeat."""
    settings = [_cells(option) for option in options(cls) if option.dest != "help"]
    shared = [] if name == _TRAIN else [cells for cells in settings if cells in of_train]
    yield f"## {name}\n\n{cleandoc(cls.__doc__ or '')}\n"
    if shared:
        names = ", ".join(_shortened([cells[0] for cells in shared]))
        yield f"As in `train`: {names}.\n"
    rest = [cells for cells in settings if cells not in shared]
    # Sorted by section, each in the order of the code: a section's own section stands behind it.
    for section, members in groupby(sorted(rest, key=_section), key=_section):
        if section:
            yield f"### {name.removeprefix('policy-trainer ')}: `{section}`\n"
        yield "\n".join(["| setting | value | default | |", "|---|---|---|---|", *map(_row, members)]) + "\n"


def _cells(option: Action) -> tuple[str, ...]:
    """Name, value, default and description."""
    described = option.help or ""
    default = _DEFAULT.search(described)
    no_value = option.nargs == 0
    return (
        option.option_strings[0].removeprefix("--").replace("-", "_"),
        "" if no_value or not option.metavar else str(option.metavar),
        default.group(1) if default else "",
        _DEFAULT.sub("", described).replace(" (required)", " **Required.**"),
    )


def _row(cells: Sequence[str]) -> str:
    name, value, default, described = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| `{name}` | {f'`{value}`' if value else ''} | {f'`{default}`' if default else ''} | {described} |"


def _section(cells: Sequence[str]) -> str:
    return cells[0].rpartition(".")[0]


def _shortened(names: Sequence[str]) -> Iterator[str]:
    """Plain settings, and each group as a whole: `loss.…`."""
    by_group: Mapping[str, None] = dict.fromkeys(
        f"`{name.partition('.')[0]}.…`" if "." in name else f"`{name}`" for name in names
    )
    return iter(by_group)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
