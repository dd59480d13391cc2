"""The type checker of the modules whose annotations have shapes; `tests/conftest.py` switches it on."""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep3119Exception

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as for pyright


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """beartype's check of each call. A function that takes a protocol, which cannot be checked, stays as it is."""
    try:
        return _check(function)
    except BeartypeDecorHintPep3119Exception:
        return function
