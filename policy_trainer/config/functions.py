"""A setting that is one of several names, or a function of the user's."""

import re
from collections.abc import Callable
from typing import Any, TypeAlias, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

# `caller:NAME` is a function that only the calling process has.
CALLER = "caller"

# `module:name`; in Python also the function itself, which is written as `caller:name`.
FunctionName: TypeAlias = str


class NameOrFunction:
    """Marks a setting of the type `Literal[…] | FunctionName`: it takes one of the names, or a function."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        names = get_args(get_args(source)[0])

        def check(value: Any) -> str | Callable[..., Any]:
            if value in names or is_function(value):
                return value
            raise ValueError(f"must be one of {', '.join(names)}, or module:name for your own function")

        text = core_schema.str_schema()
        as_text = core_schema.plain_serializer_function_ser_schema(function_label, return_schema=text)
        return core_schema.no_info_plain_validator_function(check, serialization=as_text)


def is_function(value: str | Callable[..., Any]) -> bool:
    """Whether a setting names a function of the user's, or is one."""
    return callable(value) or (isinstance(value, str) and re.fullmatch(r"[\w.]+:[\w.]+", value) is not None)


def function_label(value: str | Callable[..., Any]) -> str:
    """The setting as text."""
    if isinstance(value, str):
        return value
    name = getattr(value, "__name__", type(value).__name__)
    return f"{CALLER}:{name if name.isidentifier() else 'function'}"
