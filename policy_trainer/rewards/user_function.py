"""A user's own reward, named as `module:function`."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from policy_trainer.data.imports import import_named
from policy_trainer.data.sample import Sample
from shared.errors import UserError

# A weighted sum of larger rewards could overflow float32.
_LARGEST = 1e30


@dataclass(frozen=True)
class UserFunction:
    """Calls the function with the arguments that it names, or with all of them if it takes `**`.

    The arguments are completion, answer, prompt, messages, tokens, finished and the problem's extras.
    """

    name: str

    def load(self) -> None:
        """Imports the function. Raises UserError if that fails."""
        _load(self.name)

    def __call__(self, sample: Sample) -> float:
        """The function's result; NaN if it returns None.

        Raises ValueError for a result that is not a finite number, UserError if the function requires an argument that
        this problem does not have.
        """
        function, parameters = _load(self.name)
        known = {**sample.problem.extras, **_arguments(sample)}
        if missing := [wanted for wanted in _required(parameters) if wanted not in known]:
            raise UserError(f"rewards: {self.name} needs {', '.join(missing)}; available: {', '.join(sorted(known))}")
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        names = {parameter.name for parameter in parameters}
        answer = function(**{name: known[name] for name in known if takes_any or name in names})
        return math.nan if answer is None else _checked(answer)


def _arguments(sample: Sample) -> dict[str, Any]:
    problem = sample.problem
    return {
        "completion": sample.completion,
        "answer": problem.answer,
        "prompt": problem.prompt,
        "messages": [dict(message) for message in problem.messages],
        "tokens": sample.tokens,
        "finished": sample.finished,
    }


@cache
def _load(name: str) -> tuple[Callable[..., Any], tuple[inspect.Parameter, ...]]:
    """The function and its parameters."""
    function = import_named(name, "rewards")
    try:
        parameters = tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise UserError(f"rewards: {name} is not a function with a known signature: {error}") from error
    if positional := [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_ONLY]:
        raise UserError(f"rewards: {name} takes {', '.join(positional)} by position only: arguments are given by name")
    return function, parameters


def _required(parameters: Sequence[inspect.Parameter]) -> list[str]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in variadic]


def _checked(answer: Any) -> float:
    if isinstance(answer, str):
        raise ValueError(f"a reward must be a number, got the text {answer[:40]!r}")
    number = float(answer)
    if math.isnan(number) or abs(number) <= _LARGEST:
        return number
    raise ValueError(f"a reward must be a number of at most {_LARGEST:g}, got {number}")
