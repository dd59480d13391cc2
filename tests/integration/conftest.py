"""Models to train, and processes that end with their test."""

import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from policy_trainer.cli.demo.base_model import make_model, make_tokenizer, warm_up
from shared.models import save_model, use_threads
from tests.harness.models import tiny_model
from tests.harness.processes import Process


@pytest.fixture
def start() -> Iterator[Callable[[Process], Process]]:
    """Registers processes to be killed, with whatever they have started, when the test ends."""
    started: list[Process] = []

    def register(process: Process) -> Process:
        started.append(process)
        return process

    yield register
    for process in started:
        try:
            os.killpg(process.popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        finally:
            process.kill()


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's architecture with random weights."""
    return tiny_model(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's base model, which adds right sometimes; made once for all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    directory = shared / "base_model"
    with (shared / "base_model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            use_threads(1)  # more threads would compete with other processes
            model, tokenizer = make_model(0), make_tokenizer()
            warm_up(model, tokenizer, 0, lambda done, total: None)
            save_model(model, tokenizer, directory)
    return directory
