"""Functions of the process that began the training: rewards of a notebook, closures, lambdas; tools, environments.

No other process can import them. So the worker and evaluations send samples to this server, and get answers. Its
address is in an environment variable that the process gives its children.
"""

import math
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from policy_trainer.data.problem import Sample, Score
from policy_trainer.processes.messages import Answer, Connection, ProcessEnded, is_gone, serve
from policy_trainer.processes.user_socket import UserSocket, connect
from policy_trainer.rewards.call_log import CallLogs
from policy_trainer.rewards.failures import Failures, too_slow
from policy_trainer.rewards.functions import RewardFunction
from shared.errors import UserError

# Path of the caller's socket.
ADDRESS_VARIABLE = "TANDEM_CALLER"

_SAMPLES = TypeAdapter(list[Sample])


def read_address(name: str, setting: str = "rewards") -> str:
    """Path of the caller's socket, from the environment. Raises UserError if this process has no caller."""
    address = os.environ.get(ADDRESS_VARIABLE, "")
    if not address:
        raise UserError(
            f"{setting}: {name} is part of the Python program that began the run, and lives only there",
            f"continue with policy_trainer.GRPO there, or name other --{setting}",
        )
    return address


class CallerReward:
    """A function of the process that began the run, known here by name. It judges all samples of a round in one call.

    If the call fails or takes too long, these samples get no reward, which is logged and counted. The function cannot
    be killed: if it hangs, later calls wait behind it until they take too long, too.
    """

    def __init__(self, name: str, *, seconds: float) -> None:
        """name: with its module, as `caller:concise`. seconds: time limit of one sample. Raises UserError if this
        process has no caller."""
        self._name = name
        self._seconds = seconds
        self._address = read_address(name)
        self.failures = Failures([name])
        self.logs = CallLogs()

    def scores(self, samples: Sequence[Sample]) -> list[Score]:
        """One score for each sample; NaN where there is none. Raises UserError for a function that cannot be used."""
        if not samples:
            return []
        try:
            answers = self._ask(samples, self._seconds * len(samples))
        except ProcessEnded as ended:
            if not ended.too_slow:
                raise self._unanswered(f"it {ended}") from None
            self.failures.lost(self._name, too_slow(self._seconds, len(samples)), count=len(samples))
            return [math.nan] * len(samples)
        except OSError as error:
            raise self._unanswered(str(error)) from error
        self.logs.add(samples, answers)
        return self.failures.scores(self._name, answers)

    def _ask(self, samples: Sequence[Sample], seconds: float) -> list[dict[str, Any]]:
        """In columns of the data, dates become ISO strings, and bytes URL-safe base64."""
        values = to_jsonable_python(list(samples), bytes_mode="base64", inf_nan_mode="constants")
        with connect(self._address) as caller:
            answer = Connection(caller).ask("judge", seconds, name=self._name.partition(":")[2], samples=values)
        if "error" in answer:
            raise self._unanswered(answer["error"])
        return answer["answers"]

    def _unanswered(self, reason: str) -> UserError:
        return UserError(f"rewards: the program that began the run does not answer for {self._name}: {reason}")


class FunctionServer:
    """Serves reward functions by name, inside its `with` block. Calls run one at a time, each in a thread.

    The threads are daemons: a function that hangs does not keep the process from ending. errors: the first exception
    of each function that has failed since the block was entered last.
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFunction],
        session: Callable[[threading.Lock], AbstractContextManager[Answer]] | None = None,
    ) -> None:
        """session: entered in a thread for each session with tools or environments of this process, with a lock that
        the sessions share; None if there are none."""
        self.errors: dict[str, BaseException] = {}
        self.functions = functions
        self.session = session

    @property
    def address(self) -> str:
        """For ADDRESS_VARIABLE."""
        return self._socket.path

    def __enter__(self) -> Self:
        # New locks: a function that hangs may hold the last run's forever.
        self._turn, self.resets = threading.Lock(), threading.Lock()
        self.errors.clear()
        self._socket = UserSocket(self._serve, "reward functions")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()

    def judge(self, name: str, samples: list[Sample], client: socket.socket) -> list[dict[str, Any]] | None:
        """An answer for each sample; None if the client has disconnected, because a function hangs."""
        function, note = self.functions[name], partial(self.errors.setdefault, name)
        with self._turn:
            if is_gone(client):
                return None
            return [answer for call in function.split(samples) for answer in function.answers(call, note)]

    def _serve(self, client: socket.socket) -> None:
        """A connection asks for rewards, or is a session."""
        session: Answer | None = None

        def answer(request: dict[str, Any]) -> Mapping[str, Any] | Iterator[Mapping[str, Any]] | None:
            nonlocal session
            if request["do"] == "judge":
                return self._judged(request["name"], request["samples"], client)
            if session is None and self.session:
                session = ending.enter_context(self.session(self.resets))
            return session(request) if session else None

        with ExitStack() as ending:
            serve(client, answer)

    def _judged(self, name: str, samples: Sequence[Any], client: socket.socket) -> Mapping[str, Any] | None:
        if name not in self.functions:
            return {"error": f"this program has no function {name}"}
        answers = self.judge(name, _SAMPLES.validate_python(samples), client)
        return None if answers is None else {"answers": answers}
