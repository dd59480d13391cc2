"""The protocol of all sockets between our processes: numbered requests and their answers, each a line of JSON.

The protocol allows for what users' code may do to its socket. It may write there by mistake: lines that are not the
awaited answer are dropped, where `multiprocessing.connection` would read them as the length of a frame. It may stop in
the middle of an answer: the time limit includes the last byte, where `Connection.poll` waits only for the first. And
nothing that it sends is unpickled. Packets (SOCK_SEQPACKET) would be bounded by the socket's buffer, and macOS has
none.
"""

import json
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import count
from typing import Any

# An answer is shorter, unless users' code writes to the socket itself.
_MOST_BYTES = 2**28
_PART = 2**16
# File descriptors that come with a request.
_MOST_DESCRIPTORS = 64

# Takes a request, which is `do` and its arguments, and returns the answer, or an iterator of several; None closes the
# connection.
Answer = Callable[[dict[str, Any]], Mapping[str, Any] | Iterator[Mapping[str, Any]] | None]


class ProcessEnded(Exception):
    """The process took too long and was killed, or it ended by itself. The message says which."""

    def __init__(self, message: str, *, too_slow: bool = False) -> None:
        super().__init__(message)
        self.too_slow = too_slow


class Connection:
    """The requesting end: sends one request at a time, from any thread."""

    def __init__(self, connection: socket.socket, end: Callable[[], str] = lambda: "closed the connection") -> None:
        """end: ends the process at the other end, and returns in words how it ended."""
        self._socket = connection
        self._end = end
        self._lock = threading.Lock()
        self._numbers = count()
        self._received = bytearray()
        self._lines: deque[bytearray] = deque()  # received, and not read

    @property
    def alive(self) -> bool:
        """Whether the other end can still answer, and is idle."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._socket.settimeout(None)
            return not is_gone(self._socket)
        except OSError:  # it was closed
            return False
        finally:
            self._lock.release()

    def ask(
        self, do: str, seconds: float | None, *, descriptors: Sequence[int] = (), **arguments: Any
    ) -> dict[str, Any]:
        """Sends a request and returns its answer. If there is none, the connection is closed.

        seconds: time limit; None for none. descriptors: file descriptors that are sent with it. Raises ProcessEnded if
        there is no answer within `seconds`, ValueError, TypeError or RecursionError for arguments that JSON cannot
        represent.
        """
        (answer,) = self.ask_each(do, seconds, 1, descriptors=descriptors, **arguments)
        return answer

    def ask_each(
        self, do: str, seconds: float | None, answers: int, *, descriptors: Sequence[int] = (), **arguments: Any
    ) -> Generator[dict[str, Any]]:
        """So many answers to one request, at least one, as they come. seconds: time limit of each. Raises as `ask`.

        Until it is exhausted the connection takes no other request. If it is closed before, so is the connection.
        """
        number = next(self._numbers)
        request = _line({"number": number, "do": do, "seconds": seconds, **arguments})
        with self._lock:
            deadline = _deadline(seconds)
            try:
                self._socket.settimeout(seconds)
                sent = socket.send_fds(self._socket, [request], [*descriptors]) if descriptors else 0
                self._socket.sendall(request[sent:])
                for _ in range(answers):
                    yield self._answer(number, deadline)
                    deadline = _deadline(seconds)
            except TimeoutError:
                self.close()
                raise ProcessEnded(f"took more than {seconds:g} s", too_slow=True) from None
            except (OSError, EOFError, ValueError):
                raise ProcessEnded(self.close()) from None
            except BaseException:  # Ctrl-C, perhaps with half a request sent; or answers that nobody reads any more
                self.close()
                raise

    def close(self) -> str:
        """Closes the connection, ends the process at the other end and returns how it ended. May be called again."""
        with suppress(OSError):  # wakes a thread that waits for an answer
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        return self._end()

    def _answer(self, number: int, deadline: float) -> dict[str, Any]:
        while True:
            while self._lines:
                if (answer := _read(self._lines.popleft(), number)) is not None:
                    return answer
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self._socket.settimeout(None if left == math.inf else left)
            part = self._socket.recv(_PART)
            if not part or len(self._received) > _MOST_BYTES:
                raise EOFError
            self._received += part
            if b"\n" in part:
                *lines, self._received = self._received.split(b"\n")
                self._lines.extend(lines)


def serve(
    connection: socket.socket,
    answer: Answer,
    guard: Callable[[float], AbstractContextManager[None]] = lambda seconds: nullcontext(),
) -> None:
    """Answers requests until the other end disconnects, or `answer` returns None.

    guard: a context for each call, made from its time limit in seconds.
    """
    process = os.getpid()
    with suppress(EOFError, ConnectionError):  # the latter with a request or answers that nobody awaits any more
        while True:
            request, _ = receive(connection)
            number, seconds = request.pop("number"), request.pop("seconds")
            for answered in _answers(answer, request, partial(guard, seconds)):
                if os.getpid() != process:  # users' code has forked; only the original process may answer
                    os._exit(0)
                if answered is None:
                    return
                reply(connection, number, answered)


def _answers(
    answer: Answer, request: dict[str, Any], guard: Callable[[], AbstractContextManager[None]]
) -> Iterator[Mapping[str, Any] | None]:
    """Each is found under a guard of its own."""
    with guard():
        answered = answer(request)
    if not isinstance(answered, Iterator):
        yield answered
        return
    while True:
        with guard():
            following = next(answered, None)
        if following is None:
            return
        yield following


def receive(connection: socket.socket, *, descriptors: bool = False) -> tuple[dict[str, Any], list[int]]:
    """The next request, and the file descriptors that came with it: none unless `descriptors`. Raises EOFError once the
    other end has disconnected."""
    line, brought = bytearray(), list[int]()
    while not line.endswith(b"\n"):  # there is no second request before the answer
        if descriptors:
            part, more, _, _ = socket.recv_fds(connection, _PART, _MOST_DESCRIPTORS)
            brought += more
        else:
            part = connection.recv(_PART)
        if not part:
            raise EOFError
        line += part
    return json.loads(line), brought


def reply(connection: socket.socket, number: int, answer: Mapping[str, Any]) -> None:
    """Sends the answer to the request of this number."""
    # The first newline ends a line that users' code may have written to the socket.
    connection.sendall(b"\n" + _line({**answer, "number": number}))


def is_gone(other: socket.socket) -> bool:
    """Whether the other end has disconnected."""
    try:
        return other.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def _deadline(seconds: float | None) -> float:
    return math.inf if seconds is None else time.monotonic() + seconds


def _read(line: bytes | bytearray, number: int) -> dict[str, Any] | None:
    """The answer with this number; None for any other line."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and answer.pop("number", None) == number else None


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
