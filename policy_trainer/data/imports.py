"""Imports a task or a reward that a user names as `module:name`."""

import os
import sys
from importlib import import_module
from typing import Any

from policy_trainer.data.user_code import their_lines
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
        raise UserError("\n".join([reason, *their_lines(error)])) from error
