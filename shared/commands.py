"""Chooses the command of a program: `ref-server ping …` runs the module `ref_server.cli.ping`.

argparse finds the command; pydantic-settings, which is built on argparse, then reads its options.
"""

import os
import select
import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import TextIO


@contextmanager
def end_with_reader() -> Generator[None]:
    """Wraps a whole program: if the reader of its output has closed the pipe, as in `… | head -1`, the program ends
    quietly, as if by SIGPIPE. Other broken pipes are errors."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # otherwise Python would report the error at exit
    except BrokenPipeError:
        gone = [stream for stream in (sys.stdout, sys.stderr) if stream is not None and _reader_is_gone(stream)]
        if not gone:
            raise
        for stream in gone:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich turns it into an exit
            sys.exit(128 + signal.SIGPIPE)
        raise


def _reader_is_gone(stream: TextIO) -> bool:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # closed, or replaced by a stream without a descriptor
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


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
