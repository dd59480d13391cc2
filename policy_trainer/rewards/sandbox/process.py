"""The process in which rewards are judged that may hang or crash, as its parent sees it."""

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

from shared.lifetime import child_environment


class ProcessEnded(Exception):
    """The process does not answer: it took too long, or it ended. The message says which. It is no more."""


class SandboxProcess:
    """Starts at once, and ends with this object. It has a session of its own, so that Ctrl-C is its parent's to answer.

    It does not begin as a copy of this process, which may have threads, but as a Python that imports what it needs.
    """

    def __init__(self, *, memory: int, seconds: float) -> None:
        """memory: bytes of address space that it may have, 0 for any number. seconds: what one judgement may take."""
        self._socket, theirs = socket.socketpair()
        self._lines = self._socket.makefile("rb")
        with theirs:
            self._process = subprocess.Popen(
                # -P: not the working directory first, where a file may have the name of a library's. -u: what it prints
                # is not lost when it is killed.
                [
                    sys.executable,
                    "-P",
                    "-u",
                    "-m",
                    "policy_trainer.rewards.sandbox.child",
                    *map(str, (theirs.fileno(), memory, seconds)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=2,  # to standard error: somebody may read what this process prints
                pass_fds=[theirs.fileno()],
                env={**child_environment(), "PYTHONPATH": os.pathsep.join([*sys.path, os.getcwd()])},
                start_new_session=True,
            )
        self._end = weakref.finalize(self, _end, self._process, self._socket, self._lines)

    @property
    def alive(self) -> bool:
        # WNOWAIT: not reaped, so that its number remains that of its process group.
        return self._end.alive and not os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def send(self, request: Any, *, seconds: float) -> None:
        """Raises ProcessEnded when it is not taken within so many seconds."""
        with self._within(seconds):
            self._socket.sendall(pickle.dumps(request))

    def receive(self, *, seconds: float) -> dict[str, Any]:
        """The next answer. Raises ProcessEnded when there is none within so many seconds."""
        with self._within(seconds):
            line = self._lines.readline()
            if not line.endswith(b"\n"):
                raise EOFError
            return json.loads(line)

    def end(self) -> None:
        """Kills it, and whatever it has started."""
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
        os.killpg(process.pid, signal.SIGKILL)  # does nothing to one that has ended already
    process.wait()


def _status(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
