"""Real processes: a child that was asked to ends with its parent, however that one ends; freed memory goes back."""

import gc
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.process import PARENT_VARIABLE, child_environment, quick_imports

ROOT = str(Path(__file__).parents[2])
CHILD = """
import time
from shared.process import end_with_parent
end_with_parent()
print("ready", flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
from shared.process import child_environment
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=child_environment(), stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def start() -> tuple["subprocess.Popen[str]", int]:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    assert parent.stdout
    return parent, int(parent.stdout.readline())


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"  # what nobody reaped has ended, too


def ends_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_child_ends_with_its_parent(number: signal.Signals) -> None:
    parent, child = start()
    with parent:
        try:
            time.sleep(0.7)
            assert alive(child)  # not before
            parent.send_signal(number)
            parent.wait(60)
            assert ends_within(child, 60)
        finally:
            parent.kill()


def test_child_whose_parent_is_gone_already_ends_at_once() -> None:
    environment = {**os.environ, "PYTHONPATH": ROOT, PARENT_VARIABLE: "999999999"}
    with subprocess.Popen([sys.executable, "-c", CHILD], env=environment, stdout=subprocess.DEVNULL) as child:
        try:
            assert child.wait(60) == -signal.SIGTERM
        finally:
            child.kill()


def test_grandchildren_are_not_tied_to_their_grandparent() -> None:
    script = (
        "import os; from shared.process import *; end_with_parent(); assert PARENT_VARIABLE not in os.environ; "
        "assert child_environment()[PARENT_VARIABLE] == str(os.getpid())"
    )
    subprocess.run([sys.executable, "-c", script], env=child_environment() | {"PYTHONPATH": ROOT}, check=True)


# Frees forty blocks of 8 MiB in a thread, among small ones that stay, and says how many MiB are left of them.
FREEING = """
import threading
from pathlib import Path
from shared.process import return_freed_memory
return_freed_memory()

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 2**20

def work():
    for _ in range(2):
        large = []
        for number in range(40):
            large.append(bytearray(b"x") * (8 * 2**20))
            kept.append(bytes([number % 7]) * 100_000)
        del large

kept, before = [], resident()
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or not sys.platform.startswith("linux"), reason="only with glibc")
def test_large_blocks_go_back_to_the_system() -> None:
    left = subprocess.run(
        [sys.executable, "-c", FREEING], capture_output=True, text=True, check=True, timeout=300
    ).stdout
    assert int(left) < 40


@pytest.mark.parametrize("enabled", [True, False])
def test_imports_leave_the_garbage_collector_as_it_was(enabled: bool) -> None:
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ImportError), quick_imports():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
