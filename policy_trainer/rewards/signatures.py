"""Calls a user's own reward as its parameters ask: one completion at a time, or many in one call as TRL does."""

import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from policy_trainer.data.sample import Sample, Score
from shared.batch import MAX_REWARD
from shared.errors import UserError

if TYPE_CHECKING:  # a sandbox process without async rewards needs none of it
    import asyncio

Function = Callable[..., Any]


@dataclass(frozen=True)
class Parameters:
    """What a function is called with. required, named: its parameters' names. takes_any: it has a `**` parameter."""

    required: tuple[str, ...]
    named: frozenset[str]
    takes_any: bool

    def choose(self, name: str, known: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that the function `name` names, or all if it takes `**`. Raises UserError if one is missing."""
        if missing := [wanted for wanted in self.required if wanted not in known]:
            raise UserError(f"rewards: {name} needs {', '.join(missing)}; available: {', '.join(sorted(known))}")
        return {key: known[key] for key in known if self.takes_any or key in self.named}


@dataclass(frozen=True)
class OneAtATime:
    """`def f(completion, answer, …) -> float | None`."""

    name: str
    function: Function
    parameters: Parameters

    def __call__(self, sample: Sample) -> Score:
        """The function's result. Raises ValueError for a result that is not a finite number, UserError if the function
        requires an argument that this problem does not have."""
        return checked(self.function(**self.parameters.choose(self.name, arguments(sample))))


@dataclass(frozen=True)
class Concurrent:
    """`async def f(completion, answer, …) -> float | None`: called for all completions at once."""

    name: str
    function: Function
    parameters: Parameters

    def outcomes(self, samples: Sequence[Sample]) -> list[Score | BaseException]:
        """A score for each sample, or the exception that its call raised."""
        return _loop().run(self._gathered(samples))

    async def _gathered(self, samples: Sequence[Sample]) -> list[Score | BaseException]:
        import asyncio

        return await asyncio.gather(*map(self._score, samples), return_exceptions=True)

    async def _score(self, sample: Sample) -> Score:
        return checked(await self.function(**self.parameters.choose(self.name, arguments(sample))))


@dataclass(frozen=True)
class ManyAtOnce:
    """`def f(prompts, completions, **columns) -> list[float | None]`, which may be async."""

    name: str
    function: Function
    parameters: Parameters

    def outcomes(self, samples: Sequence[Sample]) -> list[Score | BaseException]:
        """A score for each sample. Raises ValueError if the function does not return one number or None for each."""
        result = self.function(**self.parameters.choose(self.name, _many(samples)))
        if inspect.isawaitable(result):
            result = _loop().run(_awaited(result))
        if isinstance(result, str) or not isinstance(result, Iterable):
            raise ValueError(f"it must return a list of rewards, one for each completion, got {type(result).__name__}")
        scores = list(result)
        if len(scores) != len(samples):
            raise ValueError(f"it must return one reward for each of {len(samples)} completions, got {len(scores)}")
        return [checked(score) for score in scores]


OwnReward = OneAtATime | Concurrent | ManyAtOnce


def own_reward(name: str, function: Function) -> OwnReward:
    """The function with the way in which it is called: with many completions if it has a parameter `completions`.

    name: for errors. Raises UserError for a function that cannot be called by name.
    """
    try:
        signature = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(f"rewards: {name} is not a function with a known signature: {error}") from error
    if positional := [parameter.name for parameter in signature if parameter.kind is parameter.POSITIONAL_ONLY]:
        raise UserError(f"rewards: {name} takes {', '.join(positional)} by position only: arguments are given by name")
    parameters = _parameters(signature)
    if any(parameter.name == "completions" for parameter in signature):
        return ManyAtOnce(name, function, parameters)
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__ is awaited, too
    awaited = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
    return (Concurrent if awaited else OneAtATime)(name, function, parameters)


def _parameters(signature: Iterable[inspect.Parameter]) -> Parameters:
    plain = [one for one in signature if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return Parameters(
        required=tuple(one.name for one in plain if one.default is one.empty),
        named=frozenset(one.name for one in plain),
        takes_any=any(one.kind is one.VAR_KEYWORD for one in signature),
    )


def arguments(sample: Sample) -> dict[str, Any]:
    """What is known of one completion. Our own names go before columns of the same name."""
    problem = sample.problem
    return {
        **problem.extras,
        "completion": sample.completion,
        **({"answer": problem.answer} if problem.answer else {}),
        "prompt": problem.prompt,
        "messages": [dict(message) for message in problem.messages],
        "tokens": sample.tokens,
        "finished": sample.finished,
    }


def _many(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """What is known of many completions, as TRL tells it: columns as in the data, with None where one is missing."""
    problems = [sample.problem for sample in samples]
    columns = dict.fromkeys(name for problem in problems for name in problem.extras)
    answers = [problem.answer or None for problem in problems]
    return {
        **({"answer": answers} if any(answers) else {}),
        "finished": [sample.finished for sample in samples],
        **{name: [problem.extras.get(name) for problem in problems] for name in columns if name != "prompt"},
        "prompts": [_asked(sample) for sample in samples],
        "completions": [_answered(sample) for sample in samples],
        "completion_ids": [list(sample.ids) for sample in samples],
    }


def _asked(sample: Sample) -> str | list[dict[str, str]]:
    """A text where the data has a text, else messages."""
    problem = sample.problem
    return problem.prompt or [dict(message) for message in problem.messages]


def _answered(sample: Sample) -> str | list[dict[str, str]]:
    return sample.completion if sample.problem.prompt else [{"role": "assistant", "content": sample.completion}]


@cache
def _loop() -> "asyncio.Runner":
    """One loop for the whole process: clients that a user's module keeps open belong to the loop they were used in."""
    import asyncio

    return asyncio.Runner()


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def checked(answer: Any) -> Score:
    """A reward that was returned. Raises ValueError for what is neither None nor a number that a batch takes."""
    if answer is None:
        return None
    if isinstance(answer, str):
        raise ValueError(f"a reward must be a number, got the text {answer[:40]!r}")
    try:
        number = float(answer)
    except TypeError:
        raise ValueError(f"a reward must be a number or None, got {type(answer).__name__}") from None
    if math.isnan(number) or abs(number) <= MAX_REWARD:
        return number
    raise ValueError(f"a reward must be a number of at most {MAX_REWARD:g}, got {number}")
