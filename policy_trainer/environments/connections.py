"""Connections of sessions: to processes of a fork server, and to the process that began the run."""

import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Protocol

from policy_trainer.lifecycle.user_socket import connect
from policy_trainer.rewards.function_server import SESSION, is_gone, read_address
from policy_trainer.rewards.sandbox import ProcessEnded, end_python, exit_status, read_answer, start_python
from shared.errors import UserError

# Time limit for imports, for descriptions and for making an environment, which may start programs.
START_SECONDS = 300.0
# An answer is shorter, unless a tool writes to the socket itself.
_MOST_BYTES = 2**28
_END_SECONDS = 5.0


class Place(Protocol):
    """Where sessions run."""

    def connect(self) -> "Connection":
        """A new session. Raises UserError if there can be none."""
        ...


class Connection:
    """A session's. It takes one request at a time, from any thread. end: ends the session's process, and says in words
    how it ended."""

    def __init__(self, connection: socket.socket, end: Callable[[], str]) -> None:
        self._socket = connection
        self._end = end
        self._lock = threading.Lock()
        self._numbers = count()
        self._received = bytearray()

    @property
    def alive(self) -> bool:
        """Whether the session can still answer, and is idle."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._socket.settimeout(None)
            return not is_gone(self._socket)
        except OSError:  # it was closed
            return False
        finally:
            self._lock.release()

    def ask(self, do: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        """The answer of `Host`, which has a method `do` with these arguments. Raises ProcessEnded if there is none
        within `seconds`, ValueError, TypeError or RecursionError for arguments that JSON cannot have."""
        number = next(self._numbers)
        request = json.dumps({"number": number, "do": do, "seconds": seconds, **arguments}).encode() + b"\n"
        with self._lock:
            deadline = time.monotonic() + seconds
            try:
                self._socket.settimeout(seconds)
                self._socket.sendall(request)
                return self._answer(number, deadline)
            except TimeoutError:
                self.close()
                raise ProcessEnded(f"took more than {seconds:g} s", too_slow=True) from None
            except (OSError, EOFError, ValueError):
                raise ProcessEnded(self.close()) from None

    def close(self) -> str:
        """Ends the session, and says how its process ended."""
        with suppress(OSError):  # wakes a thread that waits for an answer
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        return self._end()

    def _answer(self, number: int, deadline: float) -> dict[str, Any]:
        """Drops lines that are not the answer, since a tool may write to the socket by mistake."""
        while (seconds := deadline - time.monotonic()) > 0:
            self._socket.settimeout(seconds)
            part = self._socket.recv(2**20)
            if not part or len(self._received) > _MOST_BYTES:
                raise EOFError
            self._received += part
            if b"\n" not in part:
                continue
            *lines, self._received = self._received.split(b"\n")
            answers = (read_answer(line, number) for line in lines)
            if (answer := next((each for each in answers if each is not None), None)) is not None:
                return answer
        raise TimeoutError


class ForkedSessions:
    """Sessions in processes of their own, which a process that has imported the user's modules forks."""

    def __init__(self, tools: Sequence[str], environments: Sequence[str]) -> None:
        """Raises UserError for what cannot be imported."""
        self._modules = json.dumps({"tools": [*tools], "environments": [*environments]})
        self._lock = threading.Lock()
        self._numbers = count()
        self._closed = False
        self._start()

    def connect(self) -> Connection:
        with self._lock:
            if self._closed:
                raise UserError("tools: no more rollouts can begin: the run is ending")
            if self._process.poll() is not None:  # killed, when the machine ran out of memory
                self._stop()
                self._start()
            number, process = next(self._numbers), self._process
            try:
                ours, theirs = socket.socketpair()
                with theirs:
                    socket.send_fds(self._control, [json.dumps({"open": number}).encode()], [theirs.fileno()])
                if refusal := self._answer():
                    ours.close()
                    raise OSError(refusal)
            except (OSError, EOFError) as error:
                raise UserError(f"tools: no process can be started for a rollout: {error}") from error
        return Connection(ours, lambda: self._end(number, process))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._stop()

    def _end(self, number: int, process: subprocess.Popen[bytes]) -> str:
        with self._lock:
            if process is self._process and self._control.fileno() >= 0:
                with suppress(OSError, EOFError):
                    self._control.sendall(json.dumps({"end": number}).encode())
                    return f"ended the process, {exit_status(self._answer())}"
        return "ended the process"

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            arguments = theirs.fileno(), START_SECONDS, self._modules
            self._process = start_python("policy_trainer.environments.fork_server", *arguments)
        try:
            if refusal := self._answer():
                raise UserError(*refusal)
        except EOFError:
            self._control.close()
            status = exit_status(self._process.wait())
            raise UserError(f"tools: importing their modules took too long or ended the process, {status}") from None
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        """The process ends once its socket is closed, after it has killed its children."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        end_python(self._process)

    def _answer(self) -> Any:
        """The answer to one request. Raises EOFError if the process has ended."""
        answer = bytearray()
        while not answer.endswith(b"\n"):
            part = self._control.recv(2**16)
            if not part:
                raise EOFError("it does not answer")
            answer += part
        return json.loads(answer)


class CallerSessions:
    """Sessions in the process that began the run, each in a thread. A thread that hangs is abandoned."""

    def __init__(self, label: str, setting: str) -> None:
        """label: of a tool or environment there, for errors. Raises UserError if there is no such process."""
        self._label, self._setting = label, setting
        self._address = read_address(label, setting)

    def connect(self) -> Connection:
        try:
            connection = connect(self._address)
            connection.sendall(SESSION)
        except OSError as error:
            raise UserError(
                f"{self._setting}: the program that began the run does not answer for {self._label}: {error}"
            ) from error
        return Connection(connection, lambda: "closed the connection")
