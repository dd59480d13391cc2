"""One session, where the user's code runs.

It runs in a process of its own, or in a thread of the process that began the run.
"""

import asyncio
import inspect
import json
import os
import random
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from numpy import random as numpy_random  # numpy itself would import it in each process
from pydantic_core import PydanticSerializationError, to_jsonable_python

from policy_trainer.data.user_code import accepts, user_traceback
from policy_trainer.processes.keeper import children, kill_children
from policy_trainer.processes.limits import limit_memory
from policy_trainer.processes.messages import Answer
from policy_trainer.processes.user_output import UserOutput
from policy_trainer.rewards.environments import LIVE
from policy_trainer.rewards.functions import checked
from policy_trainer.rollout.environments.toolbox import Toolbox, method_names
from shared.errors import UserError

# Of what a call printed or raised, only the end is kept.
_MOST_LOG = 2000


class _Refused(Exception):
    """kind: of the failure, as in ToolAnswer."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Host:
    """The tools, and perhaps an environment. A request names one of the methods in `do`, and has its arguments.

    An answer has `value`, or `error` with the exception's text and `raised` with its type; `kind` of the failure, empty
    if there was none; and `log`, the end of what was printed or raised.
    """

    def __init__(self, toolbox: Toolbox, resets: threading.Lock, output: UserOutput | None = None) -> None:
        """resets: held while random numbers are seeded and used. output: of this process, if it has no other
        session."""
        self._toolbox = toolbox
        self._resets = resets
        self._output = output
        self._home, self._recursion = os.getcwd(), sys.getrecursionlimit()
        if output:
            os.umask(umask := os.umask(0o077))
            self._umask = umask
        self._kept: set[int] = set()  # processes that live as long as the environment
        self._label = self._key = ""
        self._environment: Any = None
        self._tools: dict[str, Callable[..., Any]] = {}
        self._most = 0
        self._loop = asyncio.Runner()
        self._methods = {each.__name__: each for each in (
            self.describe, self.open, self.reset, self.call, self.reward, self.get, self.invoke, self.clear
        )}  # fmt: skip

    def answer(self, request: dict[str, Any]) -> Mapping[str, Any]:
        """Never raises the user's exceptions."""
        try:
            if self._output:
                sys.setrecursionlimit(self._recursion)
            answer = {"kind": "", **self._methods[request.pop("do")](**request)}
            json.dumps(answer)
            return {"log": self._printed, **answer}
        except BaseException as error:  # the user's code may raise anything, SystemExit too
            return self._failure(error)

    @property
    def _printed(self) -> str:
        """The end of the call's output."""
        return _encodable(self._output.tail) if self._output else ""

    def _failure(self, error: BaseException) -> Mapping[str, str]:
        match error:
            case UserError():
                kind = "refused"
            case _Refused():
                kind = error.kind
            case _:
                kind = "exception"
        trace = "".join(user_traceback(error).format()) if kind == "exception" else ""
        try:
            text = str(error) or type(error).__name__
        except BaseException:
            text = type(error).__name__
        text, log = self._cut(_encodable(text))[0], _encodable((self._printed + trace)[-_MOST_LOG:])
        return {"error": text, "raised": type(error).__name__, "kind": kind, "log": log}

    def describe(self) -> Mapping[str, Any]:
        return {"value": self._toolbox.describe()}

    def open(self, environment: str | None, most_characters: int, memory: int) -> Mapping[str, str]:
        """Makes the environment of this label. Answers with its key if rewards of this process find it by that.

        memory: bytes that this process may take from now on, 0 for no limit; of no effect if others share it.
        """
        self._most = most_characters
        if self._output:
            limit_memory(memory, more=True)
        tools = [*self._toolbox.tools.values()]
        if environment is not None:
            self._label, self._environment = environment, self._toolbox.make(environment)
            tools += [getattr(self._environment, name) for name in method_names(type(self._environment))]
            if not self._output:
                self._key = secrets.token_hex()
                LIVE[self._key] = self._environment
        self._tools = {tool.__name__: tool for tool in tools}
        self._kept = children()
        return {"value": self._key}

    def clear(self) -> Mapping[str, None]:
        """Called after a rollout: kills all processes that it started, including those in other sessions."""
        if self._output:
            kill_children(but=self._kept)
        return {"value": None}

    def close(self) -> None:
        LIVE.pop(self._key, None)
        self._loop.close()

    def reset(self, columns: Mapping[str, Any], seed: int) -> Mapping[str, str | None]:
        """Raises UserError for a row without a column that it requires."""
        reset = self._environment.reset
        parameters = inspect.signature(reset).parameters
        if "seed" in parameters:
            columns = {"seed": seed, **columns}
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            columns = {name: value for name, value in columns.items() if name in parameters}
        if reason := accepts(reset, **columns):
            raise UserError(f"environment: {self._label}.reset: {reason}; the columns of a row are its arguments")
        self._go_home()
        with self._resets:
            random.seed(seed)
            numpy_random.seed(seed % 2**32)
            shown = self._awaited(reset(**columns))
        try:
            shown = _joined(shown)
        except _Refused as error:
            raise UserError(f"environment: {self._label}.reset: {error}") from None
        if shown is not None and not isinstance(shown, str):
            raise TypeError(f"reset must return a text or None, got {type(shown).__name__}")
        return {"value": None if shown is None else _encodable(shown)}

    def call(self, name: str, arguments: Mapping[str, Any]) -> Mapping[str, str]:
        tool = self._tools[name]
        if reason := accepts(tool, **arguments):
            raise _Refused("wrong_arguments", f"{name}: {reason}")
        if self._environment is None:
            self._go_home()
        result = self._awaited(tool(**arguments))
        if inspect.isgenerator(result) or inspect.isasyncgen(result):  # from a function that does not look like one
            raise TypeError("it returned a generator, which is not iterated over: return a text or a list")
        text, left_out = self._cut(_encodable(str(_joined(result))))
        return {"value": text, "kind": "too_long" if left_out else ""}

    def reward(self, method: str) -> Mapping[str, float | None]:
        return {"value": checked(self._awaited(getattr(self._environment, method)()))}

    def get(self, name: str) -> Mapping[str, Any]:
        """An attribute's value; of a method, only that it is one."""
        value = getattr(self._environment, name)
        if callable(value):
            return {"method": "async" if inspect.iscoroutinefunction(value) else "plain"}
        return {"value": _plain(value, name)}

    def invoke(self, name: str, arguments: list[Any], keywords: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"value": _plain(self._awaited(getattr(self._environment, name)(*arguments, **keywords)), f"{name}()")}

    def _awaited(self, result: Any) -> Any:
        return self._loop.run(_wait(result)) if inspect.isawaitable(result) else result

    def _go_home(self) -> None:
        """Restores the state in which rollouts begin: a call may have changed the working directory or set an alarm."""
        if self._output:
            os.chdir(self._home)
            os.umask(self._umask)
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _cut(self, text: str) -> tuple[str, int]:
        """The text, perhaps shortened, and how many characters were left out."""
        left_out = len(text) - self._most
        if left_out <= 0 or not self._most:
            return text, 0
        return f"{text[: self._most]}\n[{left_out} more characters were left out]", left_out


@contextmanager
def session_here(toolbox: Toolbox, resets: threading.Lock) -> Iterator[Answer]:
    """A session in a thread of the process that began the run."""
    host = Host(toolbox, resets)
    try:
        yield host.answer
    finally:
        host.close()


async def _wait(result: Any) -> Any:
    return await result


def _joined(result: Any) -> Any:
    """A list of content blocks as their text. Raises _Refused if there are pictures among them."""
    blocks = result if isinstance(result, list) else []
    if not blocks or not all(isinstance(each, dict) and "type" in each for each in blocks):
        return result
    if any(each["type"] != "text" for each in blocks):
        raise _Refused("pictures", "it returned pictures, which the model does not get: return texts")
    return "".join(str(each.get("text", "")) for each in blocks)


def _encodable(text: str) -> str:
    """Without the halves of characters that no tokenizer takes."""
    return text.encode(errors="replace").decode()


def _plain(value: Any, name: str) -> Any:
    """As JSON types. Raises TypeError for a value that has none."""
    try:
        return to_jsonable_python(value, fallback=lambda array: array.tolist())
    except (PydanticSerializationError, AttributeError, ValueError):
        raise TypeError(f"{name} is {type(value).__name__}, which is no JSON value: rewards get only those") from None
