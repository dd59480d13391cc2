"""Starts our commands quickly and repeatedly, by forking a process that has already imported them.

A trainer spends most of its start on imports, and so would a test that kills it many times. Each start runs the
command's `main` in a new process, which can be killed like any other.
"""

import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from shared.process import PARENT_VARIABLE

# What trainer, worker and server import first, and Qwen2 and dynamo, which the first model and optimizer would load.
# Importing runs no tensor operation, so that PyTorch has no threads yet which a fork would lose.
_PRELOADED = [
    "torch",
    "torch._dynamo",
    "transformers",
    "transformers.models.qwen2.modeling_qwen2",
    "policy_trainer.cli.train",
    "policy_trainer.cli.status",
    "policy_trainer.demo.base_model",
    "policy_trainer.trainer.run",
    "policy_trainer.rollout.run",
    "ref_server.__main__",
    "ref_server.cli.serve",
    "tests.chaos.fake_engine",
    "tests.chaos.recorded",
]


class Launched:
    """A command that runs in its own process, with its output in a file."""

    def __init__(self, process: ForkServerProcess, log: Path) -> None:
        self._process = process
        self.log = log
        assert process.pid is not None
        self.pid: int = process.pid

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """Sends a signal to the process, but not to its children. Does nothing if it has ended."""
        if self.running:
            os.kill(self.pid, number)

    def kill(self) -> int:
        """Sends SIGKILL and returns the exit status, which is -9 unless it had ended by itself."""
        self._process.kill()
        return self.wait()

    def wait(self, seconds: float = 90.0) -> int:
        """The exit status, negative for a signal."""
        deadline = time.monotonic() + seconds
        self._process.join(seconds)
        if self._process.exitcode is None:
            assert time.monotonic() >= deadline
            raise AssertionError(f"still running after {seconds} s:\n{self.output()}")
        return self._process.exitcode


class Launcher:
    """Starts commands, and kills those that still run when the block ends."""

    def __init__(self) -> None:
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)  # no effect on a fork server that already runs
        self._started: list[Launched] = []

    def __enter__(self) -> "Launcher":
        return self

    def __exit__(self, *_: object) -> None:
        for launched in self._started:
            if launched.running:
                launched.kill()

    def start(self, module: str, arguments: Sequence[str], log: Path) -> Launched:
        """Runs `main()` of a module as `python -m` would: start("policy_trainer.__main__", ["train", …], log)."""
        process = self._context.Process(target=_call_main, args=(module, list(arguments), str(log)))
        process.start()
        # Drops ended processes: each entry keeps files open, and a long test starts thousands.
        self._started = [launched for launched in self._started if launched.running]
        self._started.append(Launched(process, log))
        return self._started[-1]


def _call_main(module: str, arguments: list[str], log: str) -> None:
    """Runs in the child, which ends when the fork server ends, and so with the test, even if the test is killed."""
    os.setsid()  # Ctrl-C reaches only the test, which then ends this process
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start background jobs with SIGINT ignored
    os.environ[PARENT_VARIABLE] = str(os.getppid())
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()
