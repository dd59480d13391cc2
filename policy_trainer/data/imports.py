"""What a user names as `module:name`: a task, a reward."""

import os
import sys
from importlib import import_module
from typing import Any

from shared.errors import UserError


def import_named(name: str, setting: str) -> Any:
    """From the working directory or what is installed. Raises UserError, by the setting's name, where there is none."""
    here = os.getcwd()
    if here not in sys.path:  # a console script's path begins with its own directory instead
        sys.path.append(here)
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except MemoryError:  # not the module's fault, where memory is limited
        raise
    except Exception as error:  # whatever a module raises
        raise UserError(
            f"{setting}: {name} cannot be imported from {here}, nor from what is installed: "
            f"{type(error).__name__}: {error}"
        ) from error
