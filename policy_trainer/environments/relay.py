"""Where rewards ask for the environments of rollouts: a Unix socket of the worker, in a directory of its user's."""

import json
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from socketserver import StreamRequestHandler, ThreadingUnixStreamServer
from typing import Any

# Answers the request of a reward to the session of this number.
Ask = Callable[[int, Mapping[str, Any]], Mapping[str, Any]]


class Relay:
    def __init__(self, ask: Ask) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="tandem-")
        self.path = os.path.join(self._directory.name, "relay")
        self._server = _Server(self.path, partial(_Handler, ask))
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="relay", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._directory.cleanup()


class _Server(ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 512


class _Handler(StreamRequestHandler):
    def __init__(self, ask: Ask, *connection: Any) -> None:
        self._ask = ask
        super().__init__(*connection)

    def handle(self) -> None:
        with suppress(ConnectionError):  # the sandbox was killed
            for line in self.rfile:
                request = json.loads(line)
                self.wfile.write(json.dumps(self._ask(request.pop("session"), request)).encode() + b"\n")
