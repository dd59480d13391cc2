"""Our commands as processes, measured from outside."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from shared.process import child_environment
from tests.ports import free_port

SERVE = ("ref_server", "serve")


@contextmanager
def serving(
    *options: str, module: Sequence[str] = SERVE, before: Sequence[str] = (), log: Path = Path(os.devnull)
) -> Iterator[tuple[int, httpx.Client]]:
    """A ready server: its pid and a client of it.

    module: the module to run, and its arguments before the options. before: a command that becomes the one behind it.
    """
    port = free_port()
    command = [*before, sys.executable, "-m", *module, "--port", str(port), *options]
    # A session of its own: Ctrl-C reaches only this process, which ends the server. If this one is killed, it exits.
    with log.open("ab") as errors:
        process = subprocess.Popen(command, stderr=errors, env=child_environment(), start_new_session=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
            while not _answers(http):
                assert process.poll() is None, "the server did not start"
                time.sleep(0.1)
            yield process.pid, http
    finally:
        process.terminate()
        process.wait()


def run_policy_trainer(*arguments: str) -> None:
    """Runs a `policy-trainer` command to its end; exits with its output if it fails."""
    command = [sys.executable, "-m", "policy_trainer", *arguments]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")


def _answers(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process so far, those of threads that have ended, too."""
    return _seconds(Path(f"/proc/{pid}/stat"))


def thread_seconds(pid: int) -> dict[str, float]:
    """CPU seconds of each thread that a process has now."""
    return {task.name: _seconds(task / "stat") for task in Path(f"/proc/{pid}/task").iterdir()}


def _seconds(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    """Memory of a process that is in RAM. Linux only."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024
