"""Answers for the functions of this process: worker and evaluations ask by JSON over HTTP on the loopback."""

import hmac
import json
import secrets
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from types import TracebackType
from typing import Any, Self

from policy_trainer.data.sample import Sample
from policy_trainer.rewards.callers import Address, decode_samples
from policy_trainer.rewards.sandbox.answers import answers, shares
from policy_trainer.rewards.signatures import OwnReward


class FunctionServer:
    """Serves reward functions by name over HTTP, inside its `with` block. Calls run one at a time, each in a thread.

    The threads are daemons: a function that hangs does not keep the process from ending. errors: the first exception
    of each function that has failed since it was entered last.
    """

    def __init__(self, functions: Mapping[str, OwnReward]) -> None:
        self.errors: dict[str, BaseException] = {}
        self.functions = functions
        self._token = secrets.token_urlsafe(32)

    @property
    def address(self) -> Address:
        return Address(self._server.server_address[1], self._token)

    def __enter__(self) -> Self:
        self._turn = threading.Lock()  # a function that hung before may have the old one for ever
        self.errors.clear()
        self._server = _Server(("127.0.0.1", 0), partial(_Request, self))
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="reward functions", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def admits(self, authorization: str) -> bool:
        return hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode())

    def judge(self, name: str, samples: list[Sample], client: socket.socket) -> list[dict[str, Any]] | None:
        """An answer for each sample; None if the client has disconnected, because a function hangs."""
        function, note = self.functions[name], partial(self.errors.setdefault, name)
        with self._turn:
            if _is_gone(client):
                return None
            return [answer for share in shares(function, samples) for answer in answers(function, share, note)]


class _Server(ThreadingTCPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a worker that was killed
            super().handle_error(request, client_address)


class _Request(BaseHTTPRequestHandler):
    def __init__(self, functions: FunctionServer, *connection: Any) -> None:
        self._functions = functions
        super().__init__(*connection)

    def do_POST(self) -> None:
        name = self.path.removeprefix("/rewards/")
        if not self._functions.admits(self.headers.get("Authorization", "")):
            self._answer(HTTPStatus.UNAUTHORIZED)
        elif name not in self._functions.functions:
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            length = int(self.headers["Content-Length"])
            body = self.rfile.read(length)
            if len(body) < length:
                return  # a worker that was killed
            judged = self._functions.judge(name, decode_samples(body), self.connection)
            if judged is not None:
                self._answer(HTTPStatus.OK, json.dumps({"answers": judged}).encode())

    def _answer(self, status: HTTPStatus, body: bytes = b"") -> None:
        with suppress(ConnectionError):  # the client has stopped waiting
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def _is_gone(client: socket.socket) -> bool:
    try:
        return client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
