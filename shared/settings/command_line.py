"""Reads the command line with pydantic-settings, which is built on argparse. Reports a mistake in one line."""

import json
import re
import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Set
from inspect import cleandoc
from typing import Any

from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from shared.settings.names import Hints, Verbatim, explain_unknown, find_marks, is_secret, names_in_help
from shared.spelling import spell_option

_HELP = {"-h", "--help", "--help-all"}


def command_line(cls: type[BaseSettings], arguments: list[str], prog: str, hints: Hints) -> CliSettingsSource[Any]:
    """The settings that the arguments give. Prints the help and exits with status 0 if the arguments ask for it.

    Raises ValueError for what cannot be understood, and for secrets.
    """
    source = CliSettingsSource(cls, cli_prog_name=prog, cli_exit_on_error=False)
    parser = _parser(source, cls)
    if options := _HELP & set(arguments):
        command = prog.rpartition(" ")[2]
        _print_help(parser, set() if "--help-all" in options else names_in_help(cls, command))
        sys.exit(0)
    try:
        given, unknown = parser.parse_known_args(arguments)
    except SettingsError as error:
        raise ValueError(str(error).removeprefix("error parsing CLI: ").removeprefix("argument ")) from None
    if unknown:
        raise ValueError(_unknown(unknown, parser, hints))
    _refuse_secrets(given, cls)
    _keep_texts(given, cls)
    return source(parsed_args=given)


def options(cls: type[BaseSettings]) -> list[Action]:
    """What --help-all lists: each has its spellings, a metavar, and a help text with the default."""
    parser = _parser(CliSettingsSource(cls), cls)
    _simplify_help(parser)
    return [action for action in parser._actions if action.option_strings and action.help != SUPPRESS]


def _parser(source: CliSettingsSource[Any], cls: type[BaseSettings]) -> ArgumentParser:
    parser: ArgumentParser = source.root_parser
    parser.description = cleandoc(cls.__doc__ or "")
    _one_spelling_each(parser, cls)
    return parser


def _refuse_secrets(given: Namespace, cls: type[BaseSettings]) -> None:
    for name, info in cls.model_fields.items():
        if name in given and is_secret(info):
            variable = f"{cls.model_config.get('env_prefix', '')}{name}".upper()
            raise ValueError(
                f"{spell_option(name)}: everyone who lists processes can read a command line; "
                f"set {variable} in the environment"
            )


def _keep_texts(given: Namespace, cls: type[BaseSettings]) -> None:
    """Lists of `Verbatim` texts as JSON, since pydantic-settings would strip a list's, and divide them at commas."""
    for name, _ in find_marks(cls, Verbatim):
        if name in given:
            texts = ["--" if text == [] else text for text in getattr(given, name)]  # argparse drops `--` until 3.12
            setattr(given, name, json.dumps(texts))


def _one_spelling_each(parser: ArgumentParser, cls: type[BaseSettings]) -> None:
    """An option with a shortcut is known only by its shortcut: `json` cannot be a field's name, `as_json` can."""
    for name in cls.model_config.get("cli_shortcuts") or {}:
        action: Action = parser._option_string_actions.pop(f"--{name}")
        action.option_strings = [option for option in action.option_strings if option != f"--{name}"]


def _unknown(words: list[str], parser: ArgumentParser, hints: Hints) -> str:
    word = next((word for word in words if word.startswith("-")), words[0]).partition("=")[0]
    if not word.startswith("-"):
        return f"{word}: is neither an option nor the value of one"
    options = [action.option_strings[0][2:].replace("-", "_") for action in parser._actions if action.option_strings]
    name = word.lstrip("-").replace("-", "_")
    return f"{word}: there is no such option; {explain_unknown(name, options, hints, spell_option)}"


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


def _print_help(parser: ArgumentParser, names: Set[str]) -> None:
    """names: dotted names of the settings to print; empty prints all."""
    _simplify_help(parser)
    parser.formatter_class = _Formatter
    words = [str(action.metavar) for action in parser._actions if not action.option_strings]
    parser.usage = " ".join(["%(prog)s [OPTIONS]", *words])
    (_excerpt(parser, names) if names else parser).print_help()


def _simplify_help(parser: ArgumentParser) -> None:
    """Types in plain words, and no default where there is none."""
    for action in parser._actions:
        if isinstance(action.metavar, str) and action.option_strings:
            plain = re.sub(r"^list\[(.*)\]$", r"\1", action.metavar)
            plain = re.sub(r"^\{\{(.*)\},str\}$", r"{\1,module:name}", plain)  # choices, or a function
            name = action.dest.rpartition(".")[2]
            action.metavar = _TEXTS.get(name, "NAME") if plain == "str" else _TYPES.get(plain, plain)
        if action.help and action.help != SUPPRESS:
            action.help = _NO_DEFAULT.sub("", action.help)
            if "Default: " in action.help:  # the setting says in words what happens without it
                action.help = re.sub(r" \(default: [^()]*\)$", "", action.help)


def _excerpt(parser: ArgumentParser, names: Set[str]) -> ArgumentParser:
    listed = [action for action in parser._actions if action.help != SUPPRESS and action.option_strings]
    page = ArgumentParser(
        prog=parser.prog,
        usage=parser.usage,
        description=parser.description,
        formatter_class=_Formatter,
        epilog=f"`{parser.prog} --help-all` explains all {len(listed)} options.",
        add_help=False,
    )
    group = page.add_argument_group("the options that matter most")
    for action in listed:
        if action.dest in names:
            group._add_action(action)
    return page
