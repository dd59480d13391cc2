"""The user's tools and environments, in the process that runs them, and how they are described to the model."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policy_trainer.data.user_code import accepts, explained, import_named
from shared.errors import UserError

# Methods of an environment that are no tools.
RESERVED = ("reset", "get_reward", "get_step_reward")
# JSON's types in Python.
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": Mapping,
}  # fmt: skip


@dataclass(frozen=True)
class Toolbox:
    """Functions and environment classes by their names in the settings: `module:name`, or `caller:name`.

    A function that makes environments may take the place of a class.
    """

    tools: dict[str, Callable[..., Any]]
    environments: dict[str, Callable[..., Any]]

    @classmethod
    def load(cls, tools: Sequence[str], environments: Sequence[str]) -> "Toolbox":
        """Imports them. Raises UserError if that fails."""
        return cls(
            {label: import_named(label, "tools") for label in tools},
            {label: import_named(label, "environment") for label in environments},
        )

    def make(self, label: str) -> Any:
        """A new environment. Raises UserError if that fails."""
        with explained("environment", f"{label}()"):
            return self.environments[label]()

    def describe(self) -> dict[str, Any]:
        """tools: JSON schemas by label. environments: by label, the schemas of their tools, and which of `RESERVED`
        they have. Raises UserError for what cannot be offered to the model."""
        return {
            "tools": {label: _schema("tools", label, tool) for label, tool in self.tools.items()},
            "environments": {label: self._description(label) for label in self.environments},
        }

    def _description(self, label: str) -> dict[str, Any]:
        made = self.environments[label]
        cls = made if isinstance(made, type) else type(self.make(label))
        reserved = [name for name in RESERVED if callable(getattr(cls, name, None))]
        if "reset" not in reserved:
            raise UserError(f"environment: {label} needs a method `reset`, which begins each rollout")
        for name in reserved:
            if reason := _unusable_reserved(cls, name):
                raise UserError(f"environment: {label}.{name} {reason}")
        if isinstance(made, type) and (reason := accepts(made)):
            raise UserError(
                f"environment: {label} is made without arguments, but {reason}", "give a function that does"
            )
        # As methods of some object, so that their first parameter is left out; the class is not instantiated for it.
        methods = {name: inspect.getattr_static(cls, name).__get__(object(), cls) for name in method_names(cls)}
        schemas = [_schema("environment", f"{label}.{name}", method) for name, method in methods.items()]
        return {"tools": schemas, "reserved": reserved}


def method_names(cls: type) -> Iterator[str]:
    """The methods that are tools: the public ones, but those that have a meaning of their own. TRL's rule."""
    for name, _ in inspect.getmembers(cls, inspect.isfunction):
        if not name.startswith("_") and name not in RESERVED:
            yield name


def _unusable_reserved(cls: type, name: str) -> str:
    """Like _unusable, for methods that are not tools: `reset` gets columns by name, rewards get no arguments."""
    method = inspect.getattr_static(cls, name)
    if not inspect.isfunction(method):
        return ""
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        return "is a generator: use `return` in place of `yield`"
    parameters = [*inspect.signature(method).parameters.values()][1:]
    if name == "reset":
        by_position = [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY]
        return (
            f"takes {by_position[0]} by position only, but gets columns by name: remove the `/`" if by_position else ""
        )
    reason = accepts(method, object())
    return f"is called without arguments, but {reason}" if reason else ""


def _schema(setting: str, what: str, function: Callable[..., Any]) -> dict[str, Any]:
    # Slow to import, and no process that runs tools needs it.
    from transformers.utils.chat_template_utils import get_json_schema

    if not inspect.isroutine(function):
        raise UserError(
            f"{setting}: {what} must be a function, got {type(function).__name__}", "define a function that calls it"
        )
    if reason := _unusable(function):
        raise UserError(f"{setting}: {what} {reason}")
    try:
        return get_json_schema(function)
    except Exception as error:  # it evaluates the user's annotations, too
        raise UserError(
            f"{setting}: {what} cannot be described to the model: {error}; a tool needs a docstring in Google style, "
            "and a type hint and a description of each argument"
        ) from error


def _unusable(function: Callable[..., Any]) -> str:
    """Why no call of the function can succeed, with the remedy; else empty. Models pass all arguments by name."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return "is a generator, which is not iterated over: return a text or a list in place of `yield`"
    if not function.__name__.isidentifier():
        return f"is named {function.__name__!r}, which models cannot call: use `def`, or set __name__"
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ""  # the error about the schema is more specific
    for each in parameters:
        if each.kind is each.POSITIONAL_ONLY:
            return f"takes {each.name} by position only, but models pass arguments by name: remove the `/`"
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            return f"takes {each}, but models pass only arguments that are described: name each, or take a list"
    return ""


def misfits(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Whether an argument is of another JSON kind than its type hint."""
    hints = schema["function"]["parameters"]["properties"]
    kinds = {name: _KINDS.get(str(hints.get(name, {}).get("type"))) for name in arguments}
    return any(kind is not None and not isinstance(arguments[name], kind) for name, kind in kinds.items())
