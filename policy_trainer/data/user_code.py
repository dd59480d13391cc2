"""Imports a user's module, and explains its errors with the user's lines and without ours."""

import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from shared.errors import UserError


def import_named(name: str, setting: str) -> Any:
    """Imports `module:name` from the working directory or the installed packages.

    setting: its name, for errors. Raises UserError if the import fails.
    """
    here = os.getcwd()
    if here not in sys.path:  # the sys.path of a console script begins with the script's directory instead
        sys.path.append(here)
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except MemoryError:  # the memory limit is the cause, not the module
        raise
    except Exception as error:  # a module may raise anything
        reason = (
            f"{setting}: {name} cannot be imported from {here}, nor from the installed packages: "
            f"{type(error).__name__}: {error}"
        )
        remedy = ""
        if module.endswith(".py"):
            dotted = module.removesuffix(".py").strip("./").replace("/", ".")
            remedy = f"name the module, not its file: {dotted}:{attribute}"
        elif isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "shared":
            remedy = "Tandem has a package `shared`, which was imported before yours: give yours another name"
        raise UserError("\n".join([reason, *user_lines(error)]), remedy) from error


_PACKAGES = Path(__file__).parents[2]
_OURS = tuple(f"{_PACKAGES / name}{os.sep}" for name in ("policy_trainer", "ref_server", "shared"))
# Files of the import machinery, which a traceback of a failed import passes through.
_IMPORTS = ("<frozen importlib", importlib.__file__)
# With two lines each, and the error's own line, five in all.
_FRAMES = 2


@contextmanager
def explained(setting: str, what: str) -> Iterator[None]:
    """Turns what the user's code raises into UserError. setting, what: as in `task`, `my_tasks:Reversal.problem(3)`."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        summary = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError("\n".join([f"{setting}: {what} raised {summary}", *user_lines(error)])) from error


def accepts(function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> str | None:
    """Why the function cannot be called with these arguments; None if it can, or if its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        return str(error)
    return None


def user_traceback(error: BaseException) -> traceback.TracebackException:
    """The traceback without the frames of this program, which called the user's function."""
    whole = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = whole
    while part is not None:
        part.stack = traceback.StackSummary.from_list(user_frames(part.stack))
        part = part.__cause__ or part.__context__
    return whole


def user_frames(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames of a traceback that are not this program's, nor those of the import of a module."""
    return [frame for frame in frames if not frame.filename.startswith((*_OURS, *_IMPORTS))]


def user_lines(error: Exception) -> list[str]:
    """File, line and code of the traceback's last frames in the user's code; of a library's if there are no others."""
    frames = user_frames(traceback.extract_tb(error.__traceback__))
    libraries = tuple(f"{path}{os.sep}" for path in sysconfig.get_paths().values())
    frames = [frame for frame in frames if not frame.filename.startswith(libraries)] or frames
    return [
        line
        for frame in frames[-_FRAMES:]
        for line in (f"  {frame.filename}, line {frame.lineno}, in {frame.name}", f"    {frame.line}")
    ]
