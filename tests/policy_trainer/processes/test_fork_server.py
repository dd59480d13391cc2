"""The fork server: its children are as those of `python -m`, and nothing of it stays."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from policy_trainer.processes.children import Child
from policy_trainer.processes.fork_server import ForkedProcess, ForkServer
from policy_trainer.processes.variables import environment
from tests.harness.processes import until

OpenChild = Callable[[str], Child]
Modules = Callable[[str, str], None]

SLEEPS = """
import time
from shared.process import end_with_parent
end_with_parent()
print("up", flush=True)
time.sleep(60)
"""
# What a process can see of how it was started. The fork server has imported PyTorch, and `python -m` does so here.
REPORTS = """
import json, os, random, signal, sys
from pathlib import Path
import numpy, torch

entries = {int(name): os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
           if os.path.exists(f"/proc/self/fd/{name}")}
report = {
    "command": Path("/proc/self/cmdline").read_bytes().strip(b"\\0").decode().split("\\0"),
    "arguments": sys.argv, "name": __name__, "file": __file__, "package": __spec__.name, "path": sys.path[:1],
    "directory": os.getcwd(), "leads its session": os.getsid(0) == os.getpid(),
    "environment": {k: v for k, v in os.environ.items() if not k.startswith(("TORCHINDUCTOR_", "TANDEM_"))},
    "files": {number: name for number, name in entries.items() if not name.startswith(("socket", "anon"))},
    "passed": os.read(int(sys.argv[1]), 20).decode(),
    "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
    "threads": torch.get_num_threads(), "cuda": torch.cuda.is_initialized(),
}
print(json.dumps({"same": report, "new": [random.random(), numpy.random.rand(), torch.rand(1).item()]}))
"""


@pytest.fixture
def forked(tmp_path: Path, fork_server: ForkServer) -> OpenChild:
    return lambda module: Child("child", module, [], tmp_path / "log", forks=fork_server)


def test_it_sees_what_a_process_of_its_own_would(
    modules: Modules, fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules("reports", REPORTS)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "passed").write_text("a file")
    seen = []
    for forks in (None, fork_server, fork_server):
        with (tmp_path / "passed").open() as passed:
            child = Child("child", "reports", [str(passed.fileno()), "ü"], tmp_path / "log", {"SECRET": "s"},
                          [passed.fileno()], forks)  # fmt: skip
            child.start()
            until(lambda child=child: child.exit_status is not None)
        assert child.exit_status == 0, child.last_lines()
        assert isinstance(child._process, ForkedProcess) is (forks is not None)
        seen.append(json.loads(child.last_lines()))
    assert seen[0]["same"] == seen[1]["same"] == seen[2]["same"]
    assert seen[0]["same"]["passed"] == "a file" and seen[0]["same"]["environment"]["SECRET"] == "s"
    for numbers in zip(*(report["new"] for report in seen), strict=True):
        assert len({*numbers}) == 3, "random numbers that are not seeded differ"


def test_an_error_is_in_its_log(modules: Modules, forked: OpenChild) -> None:
    modules("fails", "import atexit\natexit.register(print, 'the end')\nraise KeyError('my mistake')\n")
    child = forked("fails")
    child.start()
    until(lambda: child.exit_status is not None)
    assert child.exit_status == 1
    assert "KeyError: 'my mistake'" in child.last_lines() and "the end" in child.last_lines()


def test_kill_9_shows_in_its_status(modules: Modules, forked: OpenChild) -> None:
    modules("sleeps", SLEEPS)
    child = forked("sleeps")
    child.start()
    assert child.pid and child.exit_status is None
    os.kill(child.pid, signal.SIGKILL)
    until(lambda: child.exit_status == -signal.SIGKILL)


def test_a_variable_that_pytorch_has_read_makes_it_a_process_of_its_own(
    modules: Modules, forked: OpenChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules("counts", "import torch\nprint(torch.get_num_threads())\n")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    child = forked("counts")
    child.start()
    assert not isinstance(child._process, ForkedProcess)
    until(lambda: child.exit_status is not None)
    assert child.last_lines() == "1"


def test_a_killed_server_takes_its_children_along_and_others_start_without_it(modules: Modules, tmp_path: Path) -> None:
    modules("sleeps", SLEEPS)
    server = ForkServer(environment())
    child = Child("child", "sleeps", [], tmp_path / "log", forks=server)
    child.start()
    assert isinstance(child._process, ForkedProcess)
    until(lambda: child.last_lines() == "up")
    server._process.kill()
    until(lambda: child.exit_status is not None)
    child.start()
    assert not isinstance(child._process, ForkedProcess)
    until(lambda: child.last_lines() == "up")
    child.stop()
    server.close()


def test_it_knows_whether_what_it_has_forked_still_runs(
    modules: Modules, forked: OpenChild, fork_server: ForkServer
) -> None:
    modules("sleeps", SLEEPS)
    child = forked("sleeps")
    child.start()
    assert not fork_server.idle
    child.stop()
    assert fork_server.idle


@pytest.mark.parametrize(("ending", "status"), [("0", 0), ("3", 3), ("None", 0), ("'why'", 1)])
def test_its_status_is_that_of_python(modules: Modules, forked: OpenChild, ending: str, status: int) -> None:
    modules("ends", f"import sys\nprint('no newline', end='')\nsys.exit({ending})\n")
    child = forked("ends")
    child.start()
    until(lambda: child.exit_status is not None)
    assert child.exit_status == status
    assert "no newline" in child.last_lines() and ("why" in child.last_lines()) is (status == 1)


def test_a_fork_of_the_parent_cannot_end_it(fork_server: ForkServer) -> None:
    if (pid := os.fork()) == 0:
        fork_server.close()
        os._exit(0 if not fork_server.serves(environment()) else 1)
    assert os.waitpid(pid, 0)[1] == 0 and fork_server.serves(environment())


def test_a_killed_parent_leaves_nothing(modules: Modules, tmp_path: Path) -> None:
    modules("sleeps", SLEEPS)
    modules("parent", PARENT)
    with subprocess.Popen([sys.executable, "-m", "parent", str(tmp_path / "log")], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [*map(int, parent.stdout.readline().split())]
        assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
        parent.kill()
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


PARENT = """
import sys, time
from pathlib import Path
from policy_trainer.processes.fork_server import ForkServer
from policy_trainer.processes.children import Child
from policy_trainer.processes.variables import environment

server = ForkServer(environment())
child = Child("child", "sleeps", [], Path(sys.argv[1]), forks=server)
child.start()
while child.last_lines() != "up":
    time.sleep(0.1)
print(server._process.pid, child.pid, flush=True)
time.sleep(60)
"""
