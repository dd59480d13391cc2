"""The processes of the chaos tests: commands forked from a warm process, and the three processes of a training run."""

import importlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from policy_trainer.demo.base_model import make_model, make_tokenizer
from shared.client import RefServerClient
from shared.models import save_model
from shared.process import PARENT_VARIABLE
from tests.integration.processes import Server

# What trainer, worker and server import first, and Qwen2 and dynamo, which the first model and optimizer would load.
# Importing runs no tensor operation, so that PyTorch has no threads yet which a fork would lose.
_PRELOADED = [
    "torch",
    "torch._dynamo",
    "transformers",
    "transformers.models.qwen2.modeling_qwen2",
    "policy_trainer.cli.training",
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


_PATIENCE = 60.0
_LOG_TAIL = 2000
# Small, so that every event is frequent: a step in a fraction of a second, a checkpoint every few.
_TRAINING = (
    "--rollout", "external", "--resume", "--max-steps", "1000000", "--threads", "1", "--lease-seconds", "10",
    "--sampling.num-generations", "2", "--sampling.prompts-per-round", "2", "--groups-per-step", "2",
    "--sampling.max-completion-length", "8", "--evaluation.problems", "2", "--evaluation.eval-steps", "0",
    "--no-loss.drop-zero-variance", "--optimizer.learning-rate", "1e-5", "--checkpoint.save-steps", "3",
    "--max-lag", "4",
)  # fmt: skip


class Ended(Exception):
    """A process ended unexpectedly, did not end on a signal, or made no progress."""


class Actor:
    """One of the processes. The output of all its lives goes to one log."""

    def __init__(self, launcher: Launcher, package: str, arguments: tuple[str, ...], log: Path) -> None:
        self._launcher = launcher
        self._package = package
        self._arguments = arguments
        self._log = log

    def start(self) -> None:
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        self.started = time.monotonic()
        self._process: Launched = self._launcher.start(f"{self._package}.__main__", self._arguments, self._log)

    def kill(self) -> None:
        self.check()
        self._process.kill()

    def end(self, number: int, *, status: int) -> None:
        """Sends it a signal and waits for its end. Raises Ended if its exit status differs."""
        self.check()
        self._process.signal(number)
        ended = self._process.wait(_PATIENCE)
        if ended != status:
            raise Ended(f"{self._log.stem} ended with status {ended}, not {status}:\n{self.output()[-_LOG_TAIL:]}")

    def check(self) -> None:
        """Raises Ended when it has ended by itself."""
        if not self._process.running:
            raise Ended(f"{self._log.stem} ended with status {self._process.wait()}:\n{self.output()[-_LOG_TAIL:]}")

    def output(self) -> str:
        """The output since the last start."""
        if not self._log.exists():
            return ""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")


class Cast:
    """Server, trainer and worker."""

    def __init__(self, launcher: Launcher, model: Path, directory: Path, port: int, url: str, store: tuple[str, ...]):
        """port: the server's. url: where trainer and worker reach it."""
        self.data = directory / "server"
        self.run_dir = directory / "run"
        self.config = self.run_dir / "config.toml"
        self.server_url = f"http://127.0.0.1:{port}"
        serve = ("serve", "--model", str(model), "--port", str(port), "--threads", "1", "--data-dir", str(self.data))
        train = ("train", "--model", str(model), "--server", url, "--run-dir", str(self.run_dir), *_TRAINING)
        rollout = ("rollout", "--config", str(self.config))
        self.actors = {
            "server": Actor(launcher, "ref_server", (*serve, *store), directory / "server.log"),
            "trainer": Actor(launcher, "policy_trainer", train, directory / "trainer.log"),
            "worker": Actor(launcher, "policy_trainer", rollout, directory / "worker.log"),
        }

    def start(self) -> None:
        self.actors["server"].start()
        self.until_ready()
        self.actors["trainer"].start()
        while not self.config.exists():
            self.actors["trainer"].check()
            time.sleep(0.05)
        self.actors["worker"].start()

    def check(self) -> None:
        for actor in self.actors.values():
            actor.check()

    def writes_checkpoint(self) -> bool:
        return any((self.run_dir / "checkpoints").glob(".tmp-*"))

    def until_ready(self) -> tuple[float, float]:
        """Seconds from the server's start until its store was open, by its log, and until it was ready, by /readyz."""
        server, store = self.actors["server"], 0.0
        while (elapsed := time.monotonic() - server.started) < _PATIENCE:
            server.check()
            store = store or (elapsed if re.search(r"queue open\b", server.output()) else 0.0)
            if self._is_ready():
                ready = time.monotonic() - server.started
                return store or ready, ready
            time.sleep(0.01)
        raise Ended(f"the server is not ready after {_PATIENCE:.0f} s:\n{server.output()[-_LOG_TAIL:]}")

    def _is_ready(self) -> bool:
        with RefServerClient(self.server_url) as client:
            return client.not_ready_reason() is None


def tiny_model(directory: Path) -> Path:
    """The demo's architecture with random weights, in `directory`/model."""
    path = directory / "model"
    save_model(make_model(0), make_tokenizer(), path)
    return path


@contextmanager
def serving(model: Path, directory: Path, *options: str) -> Iterator[Server]:
    """`ref-server serve`, ready, its data in `directory`/server; killed when the block ends."""
    directory.mkdir(parents=True, exist_ok=True)
    server = Server(model, directory, None, *options)
    try:
        yield server.until_ready()
    finally:
        server.kill()
