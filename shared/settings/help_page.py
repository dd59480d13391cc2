"""What --help prints: the settings that matter most, or all, with their types in plain words."""

import re
from argparse import SUPPRESS, Action, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence

# pydantic-settings names types as Python does. A Literal is already {a,b}.
_TYPES: Mapping[str, str] = {
    "str": "NAME",
    "int": "N",
    "float": "X",
    "Path": "PATH",
    "JSON": "JSON",
    "dict[str,Any]": "JSON",
    "tuple[float,float]": "X,X",
}
# What the text of a setting is, where it is not a name.
_TEXTS: Mapping[str, str] = {
    "server": "URL",
    "url": "URL",
    "store": "URL",
    "prompt": "TEXT",
    "completion": "TEXT",
    "stop": "TEXT",
    "system_prompt": "TEXT",
    "assistant_prefill": "TEXT",
    "operators": "TEXT",
}
_NO_DEFAULT = re.compile(r" \(default: (?:None|\[\])?\)$")


class _Formatter(RawDescriptionHelpFormatter):
    def _format_args(self, action: Action, default_metavar: str) -> str:
        if action.nargs == "*" and action.option_strings:
            return f"{action.metavar} [{action.metavar} ...]"
        return super()._format_args(action, default_metavar)


def print_help(parser: ArgumentParser, essential: Sequence[str]) -> None:
    """essential: dotted names of the settings to print, in this order; empty prints all."""
    put_plainly(parser)
    parser.formatter_class = _Formatter
    words = [str(action.metavar) for action in parser._actions if not action.option_strings]
    parser.usage = " ".join(["%(prog)s [OPTIONS]", *words])
    (_excerpt(parser, essential) if essential else parser).print_help()


def put_plainly(parser: ArgumentParser) -> None:
    """Types in plain words, and no default where there is none."""
    for action in parser._actions:
        _put_plainly(action)


def _excerpt(parser: ArgumentParser, essential: Sequence[str]) -> ArgumentParser:
    listed = [action for action in parser._actions if action.help != SUPPRESS and action.option_strings]
    by_name = {action.dest: action for action in listed}
    page = ArgumentParser(
        prog=parser.prog,
        usage=parser.usage,
        description=parser.description,
        formatter_class=_Formatter,
        epilog=f"`{parser.prog} --help-all` explains all {len(listed)} options.",
        add_help=False,
    )
    group = page.add_argument_group("the options that matter most")
    for name in essential:
        group._add_action(by_name[name])
    return page


def _put_plainly(action: Action) -> None:
    if isinstance(action.metavar, str) and action.option_strings:
        plain = re.sub(r"^list\[(.*)\]$", r"\1", action.metavar)
        name = action.dest.rpartition(".")[2]
        action.metavar = _TEXTS.get(name, "NAME") if plain == "str" else _TYPES.get(plain, plain)
    if action.help and action.help != SUPPRESS:
        action.help = _NO_DEFAULT.sub("", action.help)
        if "Default: " in action.help:  # the setting says in words what happens without it
            action.help = re.sub(r" \(default: [^()]*\)$", "", action.help)
