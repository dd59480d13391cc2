"""Our commands as processes, and waiting for them, or for threads."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PATIENCE = 180.0


class Process:
    """`python -m module`, its output in a file. It runs on when the test has ended, unless `kill` was called.

    environment: in place of this process's. before: a command that becomes the one behind it.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> None:
        self.log = log
        with log.open("ab") as file:
            # A session of its own: Ctrl-C reaches only the test, which then ends this process.
            self.popen = subprocess.Popen(
                [*before, sys.executable, "-m", module, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def wait(self, seconds: float = PATIENCE) -> int:
        """The exit status, negative for a signal."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.output()}") from None

    def terminate(self) -> int:
        """Sends SIGTERM and returns the exit status."""
        self.popen.terminate()
        return self.wait()


def until(
    condition: Callable[[], Any], what: str = "it to come true", process: Process | None = None, *,
    seconds: float = PATIENCE,
) -> Any:  # fmt: skip
    """The first true value of `condition`; if there is none in time, fails with the process's output."""
    deadline, pause = time.monotonic() + seconds, 0.005
    while not (value := condition()):
        output = f":\n{process.output()}" if process else ""
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}{output}"
        time.sleep(pause)
        pause = min(0.05, 1.5 * pause)  # a thread is there at once; asking a process costs both sides CPU time
    return value


def processes_of(run_dir: Path) -> list[int]:
    """Processes whose command line names the run's directory."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(run_dir).encode() in (entry / "cmdline").read_bytes():
                pids.append(int(entry.name))
        except OSError:
            continue  # it has just ended
    return pids
