"""Ports for the servers that tests start."""

import atexit
import socket
from collections import deque

# More than the servers of one test. Each holds its port until so many others were chosen.
_MOST = 64
_held: deque[socket.socket] = deque()


def free_port() -> int:
    """A free port of this machine, reserved against other test runs.

    A socket stays bound to it. A server can listen on it all the same: only a bound socket that listens is in the way
    of another one, once both allow it (SO_REUSEADDR, as asyncio and PostgreSQL set it).
    """
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after bind, which then takes no port of another's
    _held.append(held)
    if len(_held) > _MOST:
        _held.popleft().close()
    return held.getsockname()[1]


@atexit.register
def _release() -> None:
    for held in _held:
        held.close()
