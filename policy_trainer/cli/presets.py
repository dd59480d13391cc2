"""The command `policy-trainer presets`: the list of presets, and all settings of one."""

import json
from argparse import SUPPRESS, ArgumentParser
from typing import Any

from pydantic import BaseModel
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from policy_trainer.config import TrainConfig
from policy_trainer.config.presets import PRESETS, Preset, Setting
from policy_trainer.config.presets.preset import kl, surrogate
from shared.errors import UserError
from shared.settings import from_values

COLUMNS = 120


def run(arguments: list[str]) -> int:
    """Raises UserError when there is no such preset."""
    options = _parser().parse_args(arguments)
    console = Console(width=COLUMNS, highlight=False)
    if options.what == "show":
        preset = _find(options.name)
        if options.json:
            print(json.dumps(as_json(preset), indent=2))
        else:
            _show(preset, console)
    elif options.json:
        print(json.dumps([_overview(preset) for preset in PRESETS.values()], indent=2))
    else:
        console.print(_table())
        console.print("policy-trainer presets show NAME prints every number and its source")
    return 0


def as_json(preset: Preset) -> dict[str, Any]:
    return {
        **_overview(preset),
        "origin": preset.origin,
        "settings": {
            name: {"value": item.value, "default": default, "source": item.source, "deviation": item.deviation}
            for name, item, default in _settings(preset)
        },
        "deviations": list(preset.deviations),
        "unpublished": {name: setting(preset.config(), name) for name in preset.unpublished},
        "wants": dict(preset.wants),
    }


def setting(config: BaseModel, name: str) -> Any:
    """The value of a dotted name."""
    value: Any = config
    for key in name.split("."):
        value = getattr(value, key)
    return value


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="policy-trainer presets", description="Settings of published recipes.")
    parser.add_argument("--json", action="store_true", help="for scripts")
    commands = parser.add_subparsers(dest="what", metavar="show NAME")
    show = commands.add_parser("show", help="every number of one preset, its source, and every deviation")
    show.add_argument("name", metavar="NAME")
    # SUPPRESS keeps the value of a --json before `show`.
    show.add_argument("--json", action="store_true", default=SUPPRESS, help="for scripts")
    return parser


def _find(name: str) -> Preset:
    if name not in PRESETS:
        raise UserError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def _overview(preset: Preset) -> dict[str, str]:
    loss = preset.config().loss
    return {
        "name": preset.name,
        "summary": preset.summary,
        "data": preset.data,
        "surrogate": surrogate(loss),
        "kl": kl(loss),
    }


def _table() -> Table:
    table = Table(Column("preset", no_wrap=True), "what it is", "data", "surrogate", "KL", box=SIMPLE_HEAD)
    for preset in PRESETS.values():
        table.add_row(*_overview(preset).values())
    return table


def _show(preset: Preset, console: Console) -> None:
    console.print(f"{preset.name}: {preset.summary}\nfrom {preset.origin}\n")
    table = Table(
        Column("setting", no_wrap=True), Column("value", max_width=34), "default", "source; deviation", box=SIMPLE_HEAD
    )
    config = preset.config()
    for name, item, default in _settings(preset):
        same = "the same" if setting(config, name) == default else _text(default)
        source = item.source + (f"\nDeviation: {item.deviation}" if item.deviation else "")
        table.add_row(name, _text(item.value), same, source)
    console.print(table)
    unpublished = [f"{name} = {_text(setting(config, name))}" for name in preset.unpublished]
    for title, items in (
        ("other deviations", preset.deviations),
        ("not published; the default holds", [", ".join(unpublished)] if unpublished else []),
        ("also required", [f"{name}: {what}" for name, what in preset.wants.items()]),
    ):
        if items:
            console.print("\n".join([f"{title}:", *(f"- {item}" for item in items)]))


def _settings(preset: Preset) -> list[tuple[str, Setting, Any]]:
    """Each setting's name, its entry in the preset, and its default."""
    defaults = from_values(TrainConfig, model="MODEL")
    return [(name, item, setting(defaults, name)) for name, item in preset.settings.items()]


def _text(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)
