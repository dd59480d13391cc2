"""A reward of the user's own, by its name: `module:function`."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from policy_trainer.imports import import_named
from policy_trainer.rewards.sample import Sample
from shared.refusal import Refused

# Beyond it a weighted sum might leave float32.
_LARGEST = 1e30


@dataclass(frozen=True)
class OwnReward:
    """Calls the function with those of completion, answer, prompt, messages, tokens, finished and the problem's extras
    that it names, or with all of them when it takes `**`."""

    name: str

    def load(self) -> None:
        """Raises Refused where there is no such function."""
        _load(self.name)

    def __call__(self, sample: Sample) -> float:
        """NaN where the function answers None. Raises ValueError for what is no finite number."""
        function, wanted = _load(self.name)
        known = {**sample.problem.extras, **_known(sample)}
        answer = function(**{name: known[name] for name in known if wanted is None or name in wanted})
        return math.nan if answer is None else _number(answer)


def _known(sample: Sample) -> dict[str, Any]:
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
def _load(name: str) -> tuple[Callable[..., Any], set[str] | None]:
    """The function, and the names of its parameters; None when it takes any."""
    function = import_named(name, "rewards")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise Refused(f"rewards: {name} is no function whose parameters can be known: {error}") from error
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return function, None if takes_any else {parameter.name for parameter in parameters}


def _number(answer: Any) -> float:
    if isinstance(answer, str):
        raise ValueError(f"a reward must be a number, got the text {answer[:40]!r}")
    number = float(answer)
    if math.isnan(number) or abs(number) <= _LARGEST:
        return number
    raise ValueError(f"a reward must be a number of at most {_LARGEST:g}, got {number}")
