"""Commands of the trainer, run to their end, and what processes need, measured from outside."""

import os
import subprocess
import sys
from pathlib import Path

from shared.process import child_environment


def run_policy_trainer(*arguments: str) -> None:
    """Runs a `policy-trainer` command to its end; exits with its output if it fails."""
    command = [sys.executable, "-m", "policy_trainer", *arguments]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")


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
