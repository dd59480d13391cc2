"""Chooses the command of a program: `ref-server ping …` runs the module `ref_server.cli.ping`.

argparse finds the command; pydantic-settings, which is built on argparse, then reads its options.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType


def choose_command(
    prog: str,
    description: str,
    commands: Mapping[str, str],
    package: str,
    arguments: list[str],
    modules: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str, Callable[[], int]]:
    """The command that the first argument names, and a function that runs it and returns the exit status.

    Exits as `choose_name` does. Command `a-b` is `run(arguments)` in the module `package.a_b`, or `a_b(arguments)` in
    the module that `modules` names. The module is imported when the command is chosen: --help and health checks must
    not wait for PyTorch.
    """
    name = choose_name(prog, description, commands, arguments)
    function = name.replace("-", "_")
    module = import_module(f"{package}.{modules.get(name, function)}")
    return name, partial(getattr(module, function if name in modules else "run"), arguments[1:])


def choose_name(prog: str, description: str, commands: Mapping[str, str], arguments: list[str]) -> str:
    """The command that the first argument names. commands: name -> a line for --help.

    Exits with status 0 after --help or --version (also `COMMAND --version`), and with 2 when there is no such command.
    """
    parser = ArgumentParser(
        prog=prog, description=description, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    if "--version" in arguments[:2]:
        print(prog.split()[0], _version())
        parser.exit()
    listed = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, summary in commands.items():
        listed.add_parser(name, help=summary)
    for word in arguments[:1]:  # argparse suggests no command before Python 3.14
        if word not in commands and (near := get_close_matches(word, commands, n=1)):
            parser.error(f"argument COMMAND: there is no {word!r}; did you mean {near[0]}?")
    return parser.parse_args(arguments[:1]).command


def _version() -> str:
    try:
        return version("tandem-grpo")
    except PackageNotFoundError:
        return "of a source tree that is not installed"
