"""The parent's side of the sandbox process: starts it, talks to it, kills it."""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from shared.process import child_environment


class ProcessEnded(Exception):
    """The process took too long and was killed, or it ended by itself. The message says which."""


class SandboxProcess:
    """Starts at once and ends with this object. It has its own session, so that Ctrl-C reaches only the parent.

    It is a new Python interpreter, not a fork: the parent may have threads.
    """

    def __init__(self, *, memory: int, seconds: float) -> None:
        """memory: bytes of its address space, 0 for no limit. seconds: time limit of one judgement."""
        self._socket, theirs = socket.socketpair()
        self._lines = self._socket.makefile("rb")
        with theirs:
            self._process = subprocess.Popen(
                # -P: do not put the working directory first in sys.path, where a file may shadow a library. -u: output
                # is not lost when the process is killed.
                [
                    sys.executable,
                    "-P",
                    "-u",
                    "-m",
                    "policy_trainer.rewards.sandbox.child",
                    *map(str, (theirs.fileno(), memory, seconds)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=2,  # to standard error: this process's standard output may be piped to a program
                pass_fds=[theirs.fileno()],
                env={**child_environment(), "PYTHONPATH": os.pathsep.join([*sys.path, os.getcwd()])},
                start_new_session=True,
            )
        self._end = weakref.finalize(self, _end, self._process, self._socket, self._lines)

    @property
    def alive(self) -> bool:
        # WNOWAIT: do not reap it, so that its pid stays reserved for its process group.
        return self._end.alive and not os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def send(self, request: Any, *, seconds: float) -> None:
        """Raises ProcessEnded if the request cannot be sent within `seconds`."""
        with self._within(seconds):
            self._socket.sendall(pickle.dumps(request))

    def receive(self, *, seconds: float) -> dict[str, Any]:
        """The next answer. Raises ProcessEnded if there is none within `seconds`."""
        with self._within(seconds):
            line = self._lines.readline()
            if not line.endswith(b"\n"):
                raise EOFError
            return json.loads(line)

    def end(self) -> None:
        """Kills the process and its children."""
        self._end()

    @contextmanager
    def _within(self, seconds: float) -> Iterator[None]:
        self._socket.settimeout(seconds)
        try:
            yield
        except TimeoutError:
            self.end()
            raise ProcessEnded(f"took more than {seconds:g} s") from None
        except (EOFError, OSError):
            self.end()
            raise ProcessEnded(f"ended the process, {_status(self._process.returncode)}") from None


def _end(process: subprocess.Popen[bytes], connection: socket.socket, lines: BinaryIO) -> None:
    lines.close()
    connection.close()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # no effect on a process that has already ended
    process.wait()


def _status(code: int | None) -> str:
    """code: None while another thread is ending the process."""
    if code is None:
        return "which was stopped"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
