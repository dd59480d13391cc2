"""Functions of the process that began the training: rewards of a notebook, closures, lambdas; tools, environments.

No other process can import them. So the worker and evaluations send samples to this server, and get answers, as JSON
over HTTP on the loopback. Its port and token are in an environment variable that the process gives its children.
"""

import hmac
import json
import math
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler
from io import BufferedIOBase
from socketserver import ThreadingTCPServer
from types import TracebackType
from typing import Any, Self

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from policy_trainer.data.problem import Sample, Score
from policy_trainer.rewards.call_log import CallLogs
from policy_trainer.rewards.failures import Failures, too_slow
from policy_trainer.rewards.functions import RewardFunction
from shared.errors import UserError

# PORT:TOKEN of the caller's server.
ADDRESS_VARIABLE = "TANDEM_CALLER"

# A request to this path makes its connection that of a session: lines of JSON, which environments/host.py answers.
SESSIONS = "/sessions"

_SAMPLES = TypeAdapter(list[Sample])


def read_address(name: str, setting: str = "rewards") -> tuple[int, str]:
    """The caller's port on 127.0.0.1 and the token that it requires, from the environment.

    Raises UserError if this process has no caller.
    """
    port, _, token = os.environ.get(ADDRESS_VARIABLE, "").partition(":")
    if not token:
        raise UserError(
            f"{setting}: {name} is part of the Python program that began the run, and lives only there: "
            f"continue with policy_trainer.GRPO there, or name other --{setting}"
        )
    return int(port), token


def encode_samples(samples: Sequence[Sample]) -> bytes:
    """JSON. In columns of the data, dates become texts in ISO form, bytes URL-safe base64."""
    return json.dumps(to_jsonable_python(list(samples), bytes_mode="base64", inf_nan_mode="constants")).encode()


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
        self._port, self._token = read_address(name)
        self.failures = Failures([name])
        self.logs = CallLogs()

    def scores(self, samples: Sequence[Sample]) -> list[Score]:
        """One score for each sample; NaN where there is none. Raises UserError for a function that cannot be used."""
        if not samples:
            return []
        try:
            answers = self._post(encode_samples(samples), self._seconds * len(samples))
        except TimeoutError:
            self.failures.lost(self._name, too_slow(self._seconds, len(samples)), count=len(samples))
            return [math.nan] * len(samples)
        except (OSError, HTTPException) as error:
            raise UserError(
                f"rewards: the program that began the run does not answer for {self._name}: {error}"
            ) from error
        self.logs.add(samples, answers)
        return self.failures.scores(self._name, answers)

    def _post(self, body: bytes, seconds: float) -> list[dict[str, Any]]:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=seconds)
        try:
            headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
            connection.request("POST", f"/rewards/{self._name.partition(':')[2]}", body, headers)
            response = connection.getresponse()
            answer = response.read()
            if response.status != 200:
                raise HTTPException(f"status {response.status}")
            return json.loads(answer)["answers"]
        finally:
            connection.close()


ServeSession = Callable[[BufferedIOBase, BufferedIOBase, threading.Lock], None]


class FunctionServer:
    """Serves reward functions by name over HTTP, inside its `with` block. Calls run one at a time, each in a thread.

    The threads are daemons: a function that hangs does not keep the process from ending. errors: the first exception
    of each function that has failed since the block was entered last.
    """

    def __init__(self, functions: Mapping[str, RewardFunction], serve_session: ServeSession | None = None) -> None:
        """serve_session: called in a thread for each session with tools or environments of this process, with the
        streams of its requests and answers, and a lock that the sessions share; None if there are none."""
        self.errors: dict[str, BaseException] = {}
        self.functions = functions
        self.serve_session = serve_session
        self.token = secrets.token_urlsafe(32)

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def __enter__(self) -> Self:
        # New locks: a function that hangs may hold the last run's forever.
        self._turn, self.resets = threading.Lock(), threading.Lock()
        self.errors.clear()
        self._server = _Server(("127.0.0.1", 0), partial(_Request, self))
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="reward functions", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def judge(self, name: str, samples: list[Sample], client: socket.socket) -> list[dict[str, Any]] | None:
        """An answer for each sample; None if the client has disconnected, because a function hangs."""
        function, note = self.functions[name], partial(self.errors.setdefault, name)
        with self._turn:
            if is_gone(client):
                return None
            return [answer for call in function.split(samples) for answer in function.answers(call, note)]


class _Server(ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 512  # sessions of a round connect at once

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a worker that was killed
            super().handle_error(request, client_address)


class _Request(BaseHTTPRequestHandler):
    def __init__(self, functions: FunctionServer, *connection: Any) -> None:
        self._functions = functions
        super().__init__(*connection)

    def do_POST(self) -> None:
        name, authorization = self.path.removeprefix("/rewards/"), self.headers.get("Authorization", "")
        if not hmac.compare_digest(authorization.encode(), f"Bearer {self._functions.token}".encode()):
            self._answer(HTTPStatus.UNAUTHORIZED)
        elif self.path == SESSIONS and self._functions.serve_session:
            self.send_response(HTTPStatus.OK)
            self.end_headers()
            self._functions.serve_session(self.rfile, self.wfile, self._functions.resets)
        elif name not in self._functions.functions:
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            length = int(self.headers["Content-Length"])
            body = self.rfile.read(length)
            if len(body) < length:
                return  # a worker that was killed
            samples = _SAMPLES.validate_python(json.loads(body))
            answers = self._functions.judge(name, samples, self.connection)
            if answers is not None:
                self._answer(HTTPStatus.OK, json.dumps({"answers": answers}).encode())

    def _answer(self, status: HTTPStatus, body: bytes = b"") -> None:
        with suppress(ConnectionError):  # the client has stopped waiting
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def is_gone(client: socket.socket) -> bool:
    try:
        return client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
