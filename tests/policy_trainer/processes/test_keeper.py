"""A process and its keeper: what the process has started ends with both, and the keeper exits with its status."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from policy_trainer.processes.user_process import end_python, start_python

# Starts a grandchild in a session of its own, sends its pid, and executes the argument.
SCRIPT = """
import os, signal, socket, subprocess, sys, time
connection = socket.socket(fileno=int(sys.argv[1]))
started = subprocess.run(["sh", "-c", "setsid sleep 1010 >&- & echo $!"], stdout=subprocess.PIPE)
connection.sendall(started.stdout)
connection.recv(1)
exec(sys.argv[2])
"""
NOBODY = 65534


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "kept_script.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    return "kept_script"


def start(module: str, then: str) -> tuple[subprocess.Popen[bytes], socket.socket, psutil.Process]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = start_python(module, theirs.fileno(), then)
    return process, ours, psutil.Process(int(ours.recv(32)))


@pytest.mark.parametrize(
    ("then", "status"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("os._exit(4)", 4),
        ("os.killpg(0, signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_the_keeper_ends_as_the_process_did_and_nothing_is_left(module: str, then: str, status: int) -> None:
    process, connection, grandchild = start(module, then)
    with connection:
        assert grandchild.name() in ("sh", "setsid", "sleep")
        connection.sendall(b"\n")
        assert process.wait(60) == status
    assert not grandchild.is_running()


def test_a_process_that_ignores_signals_is_ended(module: str) -> None:
    process, connection, grandchild = start(
        module, "signal.signal(signal.SIGTERM, signal.SIG_IGN); connection.sendall(b'x'); time.sleep(1000)"
    )
    with connection:
        connection.sendall(b"\n")
        assert connection.recv(1) == b"x"
        end_python(process)
    assert process.returncode == -signal.SIGKILL and not grandchild.is_running()


@pytest.mark.parametrize("then", ["time.sleep(1000)", "os._exit(3)"])
def test_without_a_keeper_what_a_process_has_started_ends_with_it(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    script = f"import os, subprocess, time; print(subprocess.Popen(['sleep', '1012']).pid, flush=True); {then}"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout
        grandchild = psutil.Process(int(process.stdout.readline()))
        monkeypatch.setattr(sys, "platform", "darwin")
        end_python(process)
        monkeypatch.undo()
        assert process.returncode is not None
        grandchild.wait(60)


@pytest.mark.skipif(os.getuid() != 0, reason="changes its user")
def test_an_account_has_a_limit_of_processes() -> None:
    """Root has none; the limit applies to the account that owns the process."""
    script = f"""
import os, resource, subprocess
from policy_trainer.processes.keeper import kill_children
from policy_trainer.processes.limits import limit_tasks
os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})
limit_tasks(20)
started = 0
try:
    for started in range(100):
        subprocess.Popen(["/bin/sleep", "1011"])
except BlockingIOError:
    kill_children()
    print("at most", started)
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "at most 20\n"


@pytest.mark.skipif(
    sys.platform != "linux" or os.getuid() != 0 or os.readlink("/proc/self/ns/pid") != "pid:[4026531836]",
    reason="makes a namespace of processes, outside of which there is none",
)
@pytest.mark.parametrize(("way", "limited"), [([], True), (["unshare", "--pid", "--fork", "--mount-proc"], False)])
def test_only_where_all_processes_of_the_account_can_be_counted(way: list[str], limited: bool) -> None:
    """Containers with namespaces of their own share its processes."""
    script = """
import os, resource
from policy_trainer.processes.keeper import keep
before = resource.getrlimit(resource.RLIMIT_NPROC)
keep(os.dup(0))
print(resource.getrlimit(resource.RLIMIT_NPROC) != before)
"""
    root = Path(__file__).parents[3]
    command = [*way, sys.executable, "-c", script]
    done = subprocess.run(command, cwd=root, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert done.stdout == f"{limited}\n"


def test_a_child_whose_keeper_ended_before_it_was_bound_ends() -> None:
    script = """
import os
from policy_trainer.processes import keeper
bound = keeper.end_with_creator
def killed_first():
    os.kill(os.getppid(), 9)
    while os.getppid() == parent:
        os.sched_yield()
    bound()
keeper.end_with_creator = killed_first
parent = os.getpid()
keeper.keep(os.dup(0))
print("goes on")
"""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", script]
    # Waits until the child has ended, too: it holds the pipe.
    done = subprocess.run(command, cwd=root, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
