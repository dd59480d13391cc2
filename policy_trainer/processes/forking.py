"""A process forks children on request, after it has imported what they need: they start within milliseconds.

Python's own `forkserver` does not fit. A program has only one, while ours differ in what they import and may do. It
ignores modules that cannot be imported. Its children have its environment and output, and none can be ended together
with what it has started.
"""

import math
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from policy_trainer.processes.keeper import children, kill_children
from policy_trainer.processes.messages import ProcessEnded, receive, reply

# How often the process looks for children that have ended, and whether its parent is there.
_TICK = 0.2
# How often a parent that waits for a child asks whether it has ended.
_LOOK_SECONDS = 0.02
# Time limit for an answer about a child.
_SECONDS = 60.0


class Forks:
    """The side of the process that forks, which must have no other thread. It answers its parent's requests, over a
    socket that no other process has: `fork`, and `status` or `end` of a child."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._parent = os.getppid()
        self._numbers = count()
        self._pids: dict[int, int] = {}  # by the child's number: a pid may come again
        self._codes: dict[int, int] = {}  # of children that ended by themselves
        self._others = children()  # started by imported modules

    def serve(self) -> tuple[dict[str, Any], list[int]] | None:
        """Answers requests until the parent has ended, and then returns None. It also returns in each child, with the
        request and its descriptors."""
        while os.getppid() == self._parent:
            if select.select([self._control], [], [], _TICK)[0]:
                try:
                    request, descriptors = receive(self._control, descriptors=True)
                except EOFError:
                    break
                if request["do"] == "fork":
                    answer = self._fork(descriptors)
                    if answer is None:
                        return request, descriptors
                else:
                    child = request["child"]
                    answer = {"status": self.end(child) if request["do"] == "end" else self._status(child)}
                with suppress(OSError):  # the parent does not wait any more
                    reply(self._control, request["number"], answer)
            for child in [*self._pids]:
                self._look(child)
        return None

    def end_all(self) -> None:
        for child in [*self._pids]:
            self.end(child)

    def end(self, child: int) -> int:
        """Kills the child's process and all that it has started. Returns its exit code, negative for a signal."""
        pid = self._pids.pop(child, None)
        if pid is None:
            return self._codes.pop(child, 0)
        ended = _has_ended(pid)  # its group's number stays reserved
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        if not ended:  # it may not have its group yet
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        kill_children(but={*self._others, *self._pids.values()})  # adopted ones, which have left its process group
        return os.waitstatus_to_exitcode(status)

    def _fork(self, descriptors: Sequence[int]) -> dict[str, Any] | None:
        """Forks. Returns the answer to the parent, or None in the child, which has a session of its own."""
        try:
            pid = os.fork()
        except OSError as error:
            answer: dict[str, Any] = {"error": str(error)}
        else:
            if pid == 0:
                os.setsid()
                return None
            self._pids[child := next(self._numbers)] = pid
            answer = {"child": child, "pid": pid}
        for descriptor in descriptors:
            os.close(descriptor)
        return answer

    def _status(self, child: int) -> int | None:
        self._look(child)
        return None if child in self._pids else self._codes.pop(child, 0)

    def _look(self, child: int) -> None:
        if child in self._pids and _has_ended(self._pids[child]):
            self._codes[child] = self.end(child)


class ForkedProcess:
    """A child of `Forks`, with the methods of `subprocess.Popen` that its parent uses. Thread-safe."""

    def __init__(
        self, ask: Callable[..., dict[str, Any]], seconds: float, descriptors: Sequence[int], **request: Any
    ) -> None:
        """ask: the method of the connection to `Forks`. request: what the child receives, together with the
        descriptors. Raises OSError if no process can be started, ProcessEnded if there is no answer within
        `seconds`."""
        answer = ask("fork", seconds, descriptors=descriptors, **request)
        if "error" in answer:
            raise OSError(answer["error"])
        self.pid: int = answer["pid"]
        self._child = answer["child"]
        self._ask = ask
        self._status: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        with self._lock:
            if self._status is None:
                try:
                    self._status = self._ask("status", _SECONDS, child=self._child)["status"]
                except ProcessEnded:  # and the child ends, too
                    self._status = None if _runs(self.pid) else -signal.SIGKILL
            return self._status

    def wait(self, timeout: float = math.inf) -> int:
        """Raises TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(_LOOK_SECONDS)
        return status

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def end(self) -> int | None:
        """Kills it and all that it has started. Returns its exit status; None if the process that forked it is gone."""
        try:
            return self._ask("end", _SECONDS, child=self._child)["status"]
        except ProcessEnded:
            return None

    def _send(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _has_ended(pid: int) -> bool:
    """Whether a child has ended; does not reap it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _runs(pid: int) -> bool:
    """Whether a process runs that is not this one's child (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
