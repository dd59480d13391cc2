"""Our commands in processes that are forked from a warm one, for tests that kill and start them hundreds of times.

`Process` and `Server` run `python -m`, as users do, and import everything at each start. On two cores a server without
a model is ready after 0.5 s here and 1.5 s there, and the imports of trainers and workers take 10 s. So a test of a
given length has more kills, and more of them hit a process at work.
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
from typing import Self

from shared.process import PARENT_VARIABLE
from tests.harness.processes import PATIENCE

# What trainer, worker and server import first, and Qwen2, Qwen2-VL and dynamo, which the first model and optimizer
# would load.
# Importing runs no tensor operation, so that PyTorch has no threads yet which a fork would lose.
_PRELOADED = [
    "torch",
    "torch._dynamo",
    "transformers",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2_vl.modeling_qwen2_vl",
    "policy_trainer.cli.training",
    "policy_trainer.cli.status",
    "policy_trainer.cli.demo.base_model",
    "policy_trainer.trainer.run",
    "policy_trainer.rollout.run",
    "ref_server.__main__",
    "ref_server.cli.serve",
    "tests.chaos.fake_engine",
    "tests.chaos.recorded",
]
_LOG_TAIL = 2000


class Ended(Exception):
    """A process ended unexpectedly, did not end on a signal, or made no progress."""


class Actor:
    """A command in a process of its own, `main()` of a module as `python -m` runs it: started, killed, started again.

    The output of all its lives goes to one log.
    """

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        self._main = (module, list(arguments), str(log))
        self._log = log
        self._process: ForkServerProcess | None = None

    def start(self) -> Self:
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        self.started = time.monotonic()
        self._process = get_context("forkserver").Process(target=_call_main, args=self._main)
        self._process.start()
        return self

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def check(self) -> None:
        """Raises Ended when it has ended by itself."""
        if not self.running:
            raise Ended(f"{self._log.stem} ended with status {self.wait()}:\n{self.output()[-_LOG_TAIL:]}")

    def kill(self) -> int:
        """Sends SIGKILL and returns the exit status, which is -9 unless it had ended by itself."""
        assert self._process is not None
        self._process.kill()
        return self.wait()

    def end(self, number: int, status: int) -> None:
        """Sends a signal and waits for the end. Raises Ended if its exit status differs."""
        self.check()
        assert self._process is not None and self._process.pid is not None
        os.kill(self._process.pid, number)
        if (ended := self.wait()) != status:
            raise Ended(f"{self._log.stem} ended with status {ended}, not {status}:\n{self.output()[-_LOG_TAIL:]}")

    def wait(self, seconds: float = PATIENCE) -> int:
        """The exit status, negative for a signal."""
        assert self._process is not None, "it was started"
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise Ended(f"still running after {seconds} s:\n{self.output()[-_LOG_TAIL:]}")
        return self._process.exitcode

    def output(self) -> str:
        """The output since the last start."""
        if not self._log.exists():
            return ""
        return self._log.read_bytes()[self._log_start :].decode(errors="replace")


class Launcher:
    """Makes actors, and kills those that still run when the block ends."""

    def __enter__(self) -> Self:
        get_context("forkserver").set_forkserver_preload(_PRELOADED)  # no effect on one that already runs
        self._actors: list[Actor] = []
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            if actor.running:
                actor.kill()

    def actor(self, module: str, arguments: Sequence[str], log: Path) -> Actor:
        """Not started yet: actor("policy_trainer.__main__", ["train", …], log)."""
        self._actors.append(Actor(module, arguments, log))
        return self._actors[-1]


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
