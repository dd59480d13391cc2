"""Reads the command line with pydantic-settings, which is built on argparse; a mistake is told in one line."""

import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Sequence
from inspect import cleandoc
from typing import Any

from pydantic_settings import BaseSettings, CliSettingsSource, NoDecode, SettingsError

from shared.settings.help_page import print_help, put_plainly
from shared.settings.names import is_secret
from shared.settings.suggestions import Hints, explain_unknown

_HELP = {"-h", "--help", "--help-all"}


def command_line(
    cls: type[BaseSettings], arguments: list[str], prog: str, essential: Sequence[str], hints: Hints
) -> CliSettingsSource[Any]:
    """The settings that the arguments give. Prints the help and exits with status 0 where that is asked for.

    Raises ValueError for what cannot be understood, and for secrets. A list that is annotated with `NoDecode` keeps its
    strings unchanged, commas included.
    """
    source = CliSettingsSource(cls, cli_prog_name=prog, cli_exit_on_error=False)
    parser = _parser(source, cls)
    if asked := _HELP & set(arguments):
        print_help(parser, () if "--help-all" in asked else essential)
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
    put_plainly(parser)
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
    """Lists of texts as tuples, since pydantic-settings would join a list by commas."""
    for name, info in cls.model_fields.items():
        if name in given and NoDecode in info.metadata:
            texts = ("--" if text == [] else text for text in getattr(given, name))  # argparse drops `--` until 3.12
            setattr(given, name, tuple(texts))


def spell_option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _one_spelling_each(parser: ArgumentParser, cls: type[BaseSettings]) -> None:
    """An option with a shortcut is known by its shortcut alone: `json` cannot be a field's name, `as_json` can."""
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
