"""Modules that a child runs, and a fork server that starts it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from policy_trainer.processes.fork_server import ForkServer
from policy_trainer.processes.variables import environment


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes a module that a child can run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)

    return write


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer(environment())
    yield server
    server.close()
