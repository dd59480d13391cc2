"""Where the server listens, and how many connections it holds."""

import errno
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import structlog

from ref_server.access.shares import Shares, peer
from ref_server.config import ServeConfig

log = structlog.get_logger()

# Files and connections that may be open at once, where the machine allows it. The usual 1,024 are too few.
OPEN_FILES = 65_536
# Of these, kept for the store, models and logs; half of them where there are few.
_KEPT_FILES = 256


class CannotListen(Exception):
    """The address is taken, or does not belong to this machine. The message names it."""


class Listener(socket.socket):
    """A listening socket. It closes a new connection at once if its peer would hold more of them than are free.

    It counts sockets, so that those in a TLS handshake count, too. Without it the process reaches its limit of open
    files: then asyncio accepts nothing and logs that without end, and the store cannot open its files.
    """

    def __init__(self, family: int, address: Any, connections: Shares, fd: int | None = None) -> None:
        """fd: of a socket that is bound to the address already."""
        # The protocol is named, or asyncio would not turn off Nagle's algorithm and every answer would take 40 ms.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fd)
        self.connections = connections
        if fd is not None:
            return
        try:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                self.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            self.bind(address)
        except OSError:
            self.close()
            raise

    def listen(self, backlog: int = 2048) -> None:
        """Raises CannotListen if another process listens there already."""
        try:
            super().listen(backlog)
        except OSError as error:
            host, port = self.getsockname()[:2]
            raise CannotListen(f"{host} port {port}: {str(error.strerror).lower()}") from error

    def accept(self) -> tuple[socket.socket, Any]:
        accepted, address = super().accept()
        holder = peer(address[0])
        if self.connections.take(holder):
            return _Accepted(accepted, self.connections, holder), address
        accepted.close()
        log.warning("a connection is closed: its peer holds as many as are free", peer=holder)
        raise ConnectionAbortedError


class _Accepted(socket.socket):
    """Gives its place back when it is closed."""

    def __init__(self, accepted: socket.socket, connections: Shares, holder: str) -> None:
        self._place = (connections, holder)
        super().__init__(accepted.family, accepted.type, accepted.proto, accepted.detach())

    def close(self) -> None:
        if self.fileno() >= 0:
            connections, holder = self._place
            connections.give(holder)
        super().close()


@contextmanager
def listening(config: ServeConfig) -> Iterator[list[Listener]]:
    """The server's addresses, taken; connections are accepted once uvicorn serves them.

    Raises CannotListen. Enter it before a model is loaded for minutes.
    """
    connections = Shares(_most_connections())
    first = _listeners(config.host, config.port, connections) if config.fd is None else _inherited(config, connections)
    second = () if config.legacy_port is None else _listeners(config.host, config.legacy_port, connections)
    with ExitStack() as stack:
        yield [stack.enter_context(listener) for listener in chain(first, second)]


def _inherited(config: ServeConfig, connections: Shares) -> Iterator[Listener]:
    """The socket that the parent process passed on. Raises CannotListen."""
    address = (config.host, config.port)
    try:
        listener = Listener(socket.AF_INET6 if ":" in config.host else socket.AF_INET, address, connections, config.fd)
        bound = listener.getsockname()[:2]
    except OSError as error:
        raise CannotListen(f"file descriptor {config.fd}: {str(error.strerror).lower()}") from error
    if bound != address:
        listener.close()
        raise CannotListen(f"file descriptor {config.fd} listens at {bound}, but host and port are {address}")
    yield listener


def _listeners(host: str, port: int, connections: Shares) -> Iterator[Listener]:
    bound, failed = False, None
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in addresses):
            try:
                listener = Listener(family, address, connections)
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    raise
                failed = error  # of several addresses of a name some may not be this machine's
            else:
                bound = True
                yield listener
        if failed and not bound:
            raise failed
    except OSError as error:
        raise CannotListen(f"{host} port {port}: {str(error.strerror).lower()}") from error


def _most_connections() -> int:
    """Raises the process's limit of open files, and says how many of them may be connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    return max(files // 2, files - _KEPT_FILES)
