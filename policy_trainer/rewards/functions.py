"""Calls rewards, and turns their failures into answers. Users' functions get the arguments that they name.

The sandbox process and the process that began the run call `RewardFunction.answers`; `Failures.scores` reads them.
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, cached_property
from traceback import TracebackException
from typing import TYPE_CHECKING, Any, Literal

from policy_trainer.data.problem import Problem, Sample, Score
from policy_trainer.data.user_code import import_named, user_traceback
from policy_trainer.rewards.call_log import CallLog
from policy_trainer.rewards.environments import environment
from shared.batch import MAX_REWARD
from shared.errors import UserError

if TYPE_CHECKING:  # a sandbox process without async rewards needs none of it
    import asyncio

# Only the end of a traceback is sent: it names the error.
_MAX_CHARACTERS = 4000
# Arguments that only a call with many completions has. TRL's functions may name any of them and take the rest by `**`.
_OF_MANY = {"completions", "completion_ids", "environments"}


@dataclass(frozen=True)
class RewardFunction:
    """A reward, and how it is called.

    calls: `sample`: one of our rules, which takes a sample. The others are users' functions. `each`: `def f(completion,
    answer, …) -> float | None`, one completion a call; `concurrent`: the same as `async def`, called for all
    completions at once; `together`: `def f(prompts, completions, **columns) -> list[float | None]`, which may be async,
    all completions in one call. parameters: of a user's function.
    """

    name: str
    function: Callable[..., Any]
    calls: Literal["sample", "each", "concurrent", "together"]
    parameters: Sequence[inspect.Parameter] = ()

    @property
    def judges_together(self) -> bool:
        """Whether it takes many samples in one call."""
        return self.calls in ("concurrent", "together")

    def split(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """The samples of each call: all at once, or one."""
        return [list(samples)] if self.judges_together else [[sample] for sample in samples]

    def answers(
        self, samples: list[Sample], note: Callable[[BaseException], object] = lambda error: None
    ) -> list[dict[str, Any]]:
        """Calls the reward once. An answer for each sample: `score`, perhaps with what was `logged`; or `error` with
        its `kind`, or `refused` with the reason.

        note: called with each exception.
        """
        logs = [CallLog(len(samples))] if self.calls == "together" else [CallLog(1) for _ in samples]
        try:
            outcomes = self._outcomes(samples, logs)
        except BaseException as error:  # a user's reward may raise anything, SystemExit too
            # Not kept in a variable: its traceback holds this frame, and in a circle the reward's memory would stay
            # taken.
            return [self._answer(error, note)] * len(samples)
        logged = [log.of(place) for log in logs for place in range(len(samples) // len(logs))]
        return [{**self._answer(outcome, note), **more} for outcome, more in zip(outcomes, logged, strict=True)]

    def _outcomes(self, samples: Sequence[Sample], logs: Sequence[CallLog]) -> list[Score | BaseException]:
        """A score for each sample; in place of it, the exception that a concurrent call raised. logs: of each call.

        Raises ValueError if the function does not return what it should, and UserError if it requires an argument that
        the problems do not have.
        """
        if self.calls == "sample":
            return [self.function(sample) for sample in samples]
        if self.calls == "each":
            return [
                checked(self.function(**self._arguments(arguments(sample), log)))
                for sample, log in zip(samples, logs, strict=True)
            ]
        if self.calls == "concurrent":
            return _loop().run(self._gathered(samples, logs))
        result = self.function(**self._arguments(_columns(samples), logs[0]))
        if inspect.isawaitable(result):
            result = _loop().run(_awaited(result))
        # Sets and dicts are refused: they do not keep the order of the completions.
        if isinstance(result, str | bytes | Set | Mapping) or not isinstance(result, Iterable):
            raise ValueError(f"it must return a list of rewards, one for each completion, got {type(result).__name__}")
        scores = list(result)
        if len(scores) != len(samples):
            raise ValueError(f"it must return one reward for each of {len(samples)} completions, got {len(scores)}")
        return [checked(score) for score in scores]

    async def _gathered(self, samples: Sequence[Sample], logs: Sequence[CallLog]) -> list[Score | BaseException]:
        import asyncio

        return await asyncio.gather(*map(self._score, samples, logs), return_exceptions=True)

    async def _score(self, sample: Sample, log: CallLog) -> Score:
        return checked(await self.function(**self._arguments(arguments(sample), log)))

    def _arguments(self, known: Mapping[str, Any], log: CallLog) -> dict[str, Any]:
        """The known arguments that the function has parameters for, or all if it takes `**`."""
        known = {**known, **log.arguments}
        if missing := [name for name, each in self._named.items() if each.default is each.empty and name not in known]:
            raise UserError(f"rewards: {self.name} needs {', '.join(missing)}; available: {', '.join(sorted(known))}")
        return {name: value for name, value in known.items() if self._takes_any or name in self._named}

    @cached_property
    def _named(self) -> dict[str, inspect.Parameter]:
        return {each.name: each for each in self.parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}

    @cached_property
    def _takes_any(self) -> bool:
        return any(each.kind is each.VAR_KEYWORD for each in self.parameters)

    def _answer(self, outcome: Score | BaseException, note: Callable[[BaseException], object]) -> dict[str, Any]:
        if isinstance(outcome, UserError):
            return {"refused": outcome.args}
        if not isinstance(outcome, BaseException):
            return {"score": outcome if outcome is None else float(outcome)}
        note(outcome)
        trace = TracebackException.from_exception(outcome) if self.calls == "sample" else user_traceback(outcome)
        place = [f"{frame.filename}:{frame.lineno}" for frame in trace.stack[-1:]]
        lines = "".join(trace.format())
        return {"error": lines[-_MAX_CHARACTERS:], "kind": " at ".join([type(outcome).__name__, *place])}


def reward_function(name: str, function: Callable[..., Any]) -> RewardFunction:
    """The function with the way in which it is called: with many completions if it has a parameter of `_OF_MANY`.

    name: for errors. Raises UserError for a function that cannot be called by name.
    """
    try:
        parameters = tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise UserError(f"rewards: {name} is not a function with a known signature: {error}") from error
    if positional := [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY]:
        raise UserError(f"rewards: {name} takes {', '.join(positional)} by position only: arguments are given by name")
    return RewardFunction(name, function, _calls(function, {each.name for each in parameters}), parameters)


def _calls(function: Callable[..., Any], parameters: set[str]) -> Literal["each", "concurrent", "together"]:
    if "completions" in parameters or ("completion" not in parameters and parameters & _OF_MANY):
        return "together"
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__ is awaited, too
    return "concurrent" if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call) else "each"


@cache
def load_function(name: str) -> RewardFunction:
    """Imports a user's function, `module:function`. Raises UserError if that fails."""
    return reward_function(name, import_named(name, "rewards"))


def arguments(sample: Sample) -> dict[str, Any]:
    """The arguments available to a function for one completion. Tandem's names take precedence over columns.

    The values are copies, since a function may change them and the completions of a problem share it.
    """
    problem = sample.problem
    return {
        **_extras(problem),
        "completion": sample.completion,
        **({"answer": problem.answer} if problem.answer else {}),
        "prompt": problem.prompt,
        "messages": _messages(problem),
        "tokens": sample.tokens,
        "finished": sample.finished,
    }


def _columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """What a function may ask of many completions, as in TRL: columns with None for missing values.

    A prompt is a text if the data has a text, else messages, and so is its completion. That of a rollout of several
    turns always consists of messages. As in `arguments`, the values are copies.
    """
    problems = [sample.problem for sample in samples]
    extras = [_extras(problem) for problem in problems]
    columns = dict.fromkeys(name for each in extras for name in each)
    answers = [problem.answer or None for problem in problems]
    environments = [environment(sample.environment) for sample in samples]
    return {
        **({"answer": answers} if any(answers) else {}),
        "finished": [sample.finished for sample in samples],
        **{name: [each.get(name) for each in extras] for name in columns if name != "prompt"},
        "prompts": [problem.prompt or _messages(problem) for problem in problems],
        "completions": [_completion(sample) for sample in samples],
        "completion_ids": [list(sample.ids) for sample in samples],
        **({"environments": environments} if any(each is not None for each in environments) else {}),
    }


def _extras(problem: Problem) -> dict[str, Any]:
    return deepcopy(dict(problem.extras))


def _messages(problem: Problem) -> list[dict[str, Any]]:
    return [deepcopy(dict(message)) for message in problem.messages]


def _completion(sample: Sample) -> str | list[dict[str, Any]]:
    if sample.messages:
        return [deepcopy(dict(message)) for message in sample.messages]
    return sample.completion if sample.problem.prompt else [{"role": "assistant", "content": sample.completion}]


@cache
def _loop() -> "asyncio.Runner":
    """One loop for the whole process: clients that a user's module keeps open belong to the loop they were used in."""
    import asyncio

    return asyncio.Runner()


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def checked(reward: Any) -> Score:
    """A reward that a function returned. Raises ValueError unless it is None or a number that a batch accepts."""
    if reward is None:
        return None
    if isinstance(reward, str | bytes):
        raise ValueError(f"a reward must be a number, got the text {reward[:40]!r}")
    try:
        number = float(reward)
    except TypeError:
        raise ValueError(f"a reward must be a number or None, got {type(reward).__name__}") from None
    if math.isnan(number) or abs(number) <= MAX_REWARD:
        return number
    raise ValueError(f"a reward must be a number of at most {MAX_REWARD:g}, got {number}")
