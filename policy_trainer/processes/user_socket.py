"""A server for this user's processes: a Unix socket in a directory that no other account can enter."""

import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from socketserver import BaseRequestHandler, ThreadingUnixStreamServer
from typing import Any

# An address has at most 104 bytes on macOS and 108 on Linux, including a zero byte at its end.
_MOST_BYTES = 103
_NAME = "socket"
_CONNECT_SECONDS, _RETRY_SECONDS = 5.0, 0.05


class UserSocket:
    """Calls `serve` for each connection, in a daemon thread, until it is closed. Only processes of this user and of
    root can connect: the directory of the socket has mode 0700."""

    def __init__(self, serve: Callable[[socket.socket], None], name: str) -> None:
        """name: the thread's."""
        self._directory = _directory()
        self.path = os.path.join(self._directory.name, _NAME)
        try:
            self._server = _Server(self.path, partial(_Handler, serve))
        except BaseException:
            self._directory.cleanup()
            raise
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name=name, daemon=True).start()

    def close(self) -> None:
        """Accepts no more connections; open ones stay open."""
        self._server.shutdown()
        self._server.server_close()
        self._directory.cleanup()


class _Handler(BaseRequestHandler):
    def __init__(self, serve: Callable[[socket.socket], None], *connection: Any) -> None:
        self._serve = serve
        super().__init__(*connection)

    def handle(self) -> None:
        self._serve(self.request)


class _Server(ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 512  # sessions of a round connect at once

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that was killed
            super().handle_error(request, client_address)


def connect(path: str) -> socket.socket:
    """A connection to the UserSocket of this path. Waits while too many others connect. Raises OSError."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            return connection
        except BaseException as error:
            connection.close()
            # macOS refuses where Linux waits.
            if not isinstance(error, ConnectionRefusedError) or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_SECONDS)


def _directory() -> tempfile.TemporaryDirectory[str]:
    """A new directory in the usual place for temporary files, or in /tmp if the address would be too long there."""
    made = tempfile.TemporaryDirectory(prefix="tandem-")
    if len(os.fsencode(os.path.join(made.name, _NAME))) <= _MOST_BYTES:
        return made
    made.cleanup()
    return tempfile.TemporaryDirectory(prefix="tandem-", dir="/tmp")
