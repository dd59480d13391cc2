"""Functions of the process that began the training: rewards of a notebook, closures, lambdas; tools, environments.

No other process can import them. So the worker and evaluations send samples to this server, and get answers, as lines
of JSON. Its address is in an environment variable that the process gives its children.
"""

import json
import math
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BufferedIOBase
from socketserver import StreamRequestHandler
from types import TracebackType
from typing import Any, Self

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from policy_trainer.data.problem import Sample, Score
from policy_trainer.lifecycle.user_socket import UserSocket, connect
from policy_trainer.rewards.call_log import CallLogs
from policy_trainer.rewards.failures import Failures, too_slow
from policy_trainer.rewards.functions import RewardFunction
from shared.errors import UserError

# Path of the caller's socket.
ADDRESS_VARIABLE = "TANDEM_CALLER"

# This request turns its connection into a session, whose further requests environments/host.py answers.
SESSION = b'{"session": true}\n'

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


def judge_request(name: str, samples: Sequence[Sample]) -> bytes:
    """A line of JSON. In columns of the data, dates become ISO strings, and bytes URL-safe base64."""
    values = to_jsonable_python(list(samples), bytes_mode="base64", inf_nan_mode="constants")
    return json.dumps({"judge": name, "samples": values}).encode() + b"\n"


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
        except TimeoutError:
            self.failures.lost(self._name, too_slow(self._seconds, len(samples)), count=len(samples))
            return [math.nan] * len(samples)
        except OSError as error:
            raise UserError(
                f"rewards: the program that began the run does not answer for {self._name}: {error}"
            ) from error
        self.logs.add(samples, answers)
        return self.failures.scores(self._name, answers)

    def _ask(self, samples: Sequence[Sample], seconds: float) -> list[dict[str, Any]]:
        with connect(self._address) as connection, connection.makefile("rb") as answers:
            connection.settimeout(seconds)
            connection.sendall(judge_request(self._name.partition(":")[2], samples))
            line = answers.readline()
        if not line:
            raise ConnectionError("it closed the connection")
        answer = json.loads(line)
        if "error" in answer:
            raise ConnectionError(answer["error"])
        return answer["answers"]


ServeSession = Callable[[BufferedIOBase, BufferedIOBase, threading.Lock], None]


class FunctionServer:
    """Serves reward functions by name, inside its `with` block. Calls run one at a time, each in a thread.

    The threads are daemons: a function that hangs does not keep the process from ending. errors: the first exception
    of each function that has failed since the block was entered last.
    """

    def __init__(self, functions: Mapping[str, RewardFunction], serve_session: ServeSession | None = None) -> None:
        """serve_session: called in a thread for each session with tools or environments of this process, with the
        streams of its requests and answers, and a lock that the sessions share; None if there are none."""
        self.errors: dict[str, BaseException] = {}
        self.functions = functions
        self.serve_session = serve_session

    @property
    def address(self) -> str:
        """For ADDRESS_VARIABLE."""
        return self._socket.path

    def __enter__(self) -> Self:
        # New locks: a function that hangs may hold the last run's forever.
        self._turn, self.resets = threading.Lock(), threading.Lock()
        self.errors.clear()
        self._socket = UserSocket(self._answer, "reward functions")
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

    def _answer(self, client: StreamRequestHandler) -> None:
        line = client.rfile.readline()
        if not line.endswith(b"\n"):
            return  # a worker that was killed
        request = json.loads(line)
        if "session" in request:
            if self.serve_session:
                self.serve_session(client.rfile, client.wfile, self.resets)
        elif (answer := self._judged(request, client.connection)) is not None:
            client.wfile.write(json.dumps(answer).encode() + b"\n")

    def _judged(self, request: Mapping[str, Any], client: socket.socket) -> Mapping[str, Any] | None:
        name = request["judge"]
        if name not in self.functions:
            return {"error": f"this program has no function {name}"}
        answers = self.judge(name, _SAMPLES.validate_python(request["samples"]), client)
        return None if answers is None else {"answers": answers}


def is_gone(client: socket.socket) -> bool:
    try:
        return client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
