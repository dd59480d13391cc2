"""Models to train, processes that end with their test, and a Slurm cluster."""

import fcntl
import os
import pwd
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from policy_trainer.cli.demo.base_model import make_model, make_tokenizer, warm_up
from shared.models import save_model, use_threads
from tests.harness.models import tiny_model
from tests.harness.postgresql import PostgresMissing, binaries, unprivileged
from tests.harness.processes import Process
from tests.harness.slurm import Slurm, SlurmMissing, slurm


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


@pytest.fixture
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with PostgreSQL's programs, which root may call: they run as another user, in a namespace where that
    user owns root's files."""
    try:
        programs = binaries()
    except PostgresMissing as missing:
        pytest.skip(str(missing))
    directory, user = tmp_path_factory.mktemp("postgresql"), unprivileged()
    prefix = ""
    if user:
        entry = pwd.getpwnam(user)
        prefix = f"unshare --user --map-user={entry.pw_uid} --map-group={entry.pw_gid} "
    for name in ("initdb", "pg_ctl"):
        script = directory / name
        script.write_text(f'#!/bin/sh\nexec {prefix}{programs / name} "$@"\n')
        script.chmod(0o755)
    return directory


@pytest.fixture
def cluster(postgresql: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    monkeypatch.setenv("PATH", f"{postgresql}{os.pathsep}{os.environ['PATH']}")
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:  # on a cluster the name of a node leads to it
        (postgresql / "hostname").write_text("#!/bin/sh\necho localhost\n")
        (postgresql / "hostname").chmod(0o755)
    try:
        with slurm(nodes=4) as started:
            for name, value in started.variables.items():
                monkeypatch.setenv(name, value)
            yield started
    except SlurmMissing as missing:
        pytest.skip(str(missing))
