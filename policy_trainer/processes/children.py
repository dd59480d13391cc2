"""Child processes that run our programs, and restarts of those that die."""

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from policy_trainer.processes.fork_server import ForkServer
from policy_trainer.processes.forking import ForkedProcess
from policy_trainer.processes.lifecycle.endings import RunFailed, signals_deferred
from policy_trainer.processes.variables import environment
from shared.errors import printable

_LAST_LINES = 12
# A log of more bytes than the first number is cut to the second: a user's code may print a lot.
_MOST_LOG, _KEPT_LOG = 2**26, 2**20
# Longer than a reference server takes to shut down.
_STOP_SECONDS = 35.0

# After this many deaths in a row, a restart does not help.
_MAX_DEATHS = 5
# Exit status of a command that refuses its settings or data: another start would end the same way.
_REFUSED = 2


class Child:
    """Runs a Python module as a child process, with its output in a log file. It ends when this process ends.

    It has its own session, so that Ctrl-C reaches only this process, which then stops it.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        secrets: Mapping[str, str] | None = None,
        inherited: Sequence[int] = (),
        forks: ForkServer | None = None,
    ) -> None:
        """secrets: additional environment variables of the child. inherited: file descriptors that it keeps open, such
        as that of a lock. forks: the fork server, which starts the child with PyTorch imported, if it can."""
        self.name = name
        self._module = module
        self._arguments = arguments
        self._log = log
        self._secrets = secrets or {}
        self._inherited = inherited
        self._forks = forks
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._start = 0
        self._terminated = False

    def start(self) -> None:
        self._terminated = False
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log, signals_deferred():
            self._start = log.tell()
            what = self._module, self._arguments, log.fileno(), {**environment(), **self._secrets}, self._inherited
            self._process = (self._forks and self._forks.fork(*what)) or _run(*what)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._process.poll() if self._process else None

    def last_lines(self) -> str:
        """The last lines of its output since it was last started, with control characters escaped."""
        lines = self._log.read_bytes()[self._start :].decode(errors="replace").splitlines()
        return "\n".join(map(printable, lines[-_LAST_LINES:]))

    def bound_log(self) -> None:
        """Drops the beginning of a log that has become too long. The child appends to it."""
        with suppress(FileNotFoundError):
            if self._log.stat().st_size > _MOST_LOG:
                with self._log.open("r+b") as log:
                    log.seek(-_KEPT_LOG, os.SEEK_END)
                    kept = log.read().partition(b"\n")[2]
                    log.truncate(0)
                with self._log.open("ab") as log:
                    log.write(b"[the beginning of this log is left out]\n" + kept)
                self._start = 0

    def terminate(self) -> None:
        """Sends SIGTERM, but only once: a second signal would interrupt a server that is shutting down."""
        if self._process is not None and not self._terminated:
            self._terminated = True
            self._process.terminate()

    def stop(self) -> None:
        """Sends SIGTERM, and SIGKILL if the child has not ended after _STOP_SECONDS."""
        self.terminate()
        if self._process is None:
            return
        try:
            self._process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _run(
    module: str, arguments: Sequence[str], log: int, environment: Mapping[str, str], inherited: Sequence[int]
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        # -P: what lies in the working directory does not come before libraries of its name, as in the parent.
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
        pass_fds=inherited,
    )


class RestartedChild:
    """Restarts a child that has died, after pauses of 1, 2, 4 and 8 seconds. Safe to check from any thread."""

    def __init__(
        self, child: Child, note: Callable[[str], None], *, futile: str = "", lasting: float = math.inf
    ) -> None:
        """futile: ends the message of the last error, and says what the child has not done. lasting: a child that ran
        for this many seconds starts the count of deaths anew, as `succeeded` does."""
        self._child = child
        self._note = note
        self._futile = futile
        self._lasting = lasting
        self._deaths = 0
        self._born = 0.0
        self._not_before = 0.0
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        return self._child.pid

    @property
    def exit_report(self) -> str | None:
        """How the child died, with its last output; None while it runs."""
        status = self._child.exit_status
        if status is None:
            return None
        return f"the {self._child.name} died with status {status}; its last output:\n{self._child.last_lines()}"

    def start(self) -> None:
        self._not_before, self._born = 0.0, time.monotonic()
        self._child.start()

    def check(self) -> None:
        """Starts a dead child again, after a pause. Raises RunFailed if that does not help."""
        with self._lock:
            self._child.bound_log()
            exit_report = self.exit_report
            if exit_report is None:
                return
            if not self._not_before:
                self._rest(exit_report)
            if time.monotonic() >= self._not_before:
                self.start()

    def succeeded(self) -> None:
        """Resets the count of deaths. To be called when the child has done its work."""
        self._deaths = 0

    def terminate(self) -> None:
        self._child.terminate()

    def stop(self) -> None:
        self._child.stop()

    def _rest(self, exit_report: str) -> None:
        self._deaths = 1 if time.monotonic() - self._born >= self._lasting else self._deaths + 1
        if self._child.exit_status == _REFUSED:
            raise RunFailed(exit_report)
        if self._deaths >= _MAX_DEATHS:
            raise RunFailed(f"{exit_report}\nit died {self._deaths} times{self._futile}")
        self._note(f"{exit_report}\nstarting it again")
        self._not_before = time.monotonic() + 2.0 ** (self._deaths - 1)
