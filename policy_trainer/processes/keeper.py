"""Runs one of our modules that executes the user's code, and kills everything that this code has started.

`python -m policy_trainer.processes.keeper DESCRIPTOR MODULE ARGUMENT…` runs MODULE in a child, which gets the
descriptor and the arguments; the keeper waits. It runs none of the user's code, so it survives when the child is
killed: it then adopts all descendants of the child (Linux), even those in other sessions, and kills them. It exits with
the child's status. SIGTERM from its parent ends both, and so does the parent's end.
"""

import ctypes
import os
import resource
import runpy
import signal
import sys
from collections.abc import Collection
from contextlib import suppress

from policy_trainer.processes.limits import limit_tasks
from shared.process import PARENT_VARIABLE

# Seconds between checks that the parent is alive.
_TICK = 0.5
# From linux/prctl.h.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_THREADS = "/proc/self/task"
# From linux/proc_ns.h: the only namespace of processes in whose /proc an account's processes can all be counted.
_ALL_PROCESSES = "pid:[4026531836]"
# When the user's code starts a process or thread, the account may have this many more of them than at the start: above
# what many rollouts with compilers or browsers need, and far below the 4194304 pids of Linux, so that a fork bomb
# in a tool leaves the account able to log in and end it.
_MORE_TASKS = 1000


def keep(descriptor: int) -> None:
    """Forks a child and returns in it; this process becomes the keeper, and does not return.

    On systems other than Linux it returns at once. descriptor: the child's, which the keeper closes.
    """
    if sys.platform != "linux":
        return
    parent, signals = os.getppid(), {signal.SIGCHLD, signal.SIGTERM}
    adopt_orphans()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    keeper = os.getpid()
    child = os.fork()
    if child:
        os.close(descriptor)
        while os.getppid() == parent and not _ended(child):
            if (woken := signal.sigtimedwait(signals, _TICK)) and woken.si_signo == signal.SIGTERM:
                break
        _end_as(_killed(child))
    end_with_creator()
    if os.getppid() != keeper:  # it ended before the line above
        os._exit(1)
    os.environ[PARENT_VARIABLE] = str(keeper)
    os.setsid()  # a signal to its group does not reach the keeper
    # Elsewhere the system also counts the account's processes in other containers; there the engine's limit holds.
    if os.readlink("/proc/self/ns/pid") == _ALL_PROCESSES:
        limit_tasks(_MORE_TASKS)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def adopt_orphans() -> None:
    """Makes descendants of this process its children when their parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_creator() -> None:
    """Makes the kernel kill this process when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def children() -> set[int]:
    """The pids of this process's children. Empty where the system does not list them."""
    pids: set[int] = set()
    for thread in os.listdir(_THREADS) if os.path.isdir(_THREADS) else ():
        with suppress(OSError), open(f"{_THREADS}/{thread}/children") as file:  # the thread may have ended
            pids |= {*map(int, file.read().split())}
    return pids


def kill_children(but: Collection[int] = ()) -> None:
    """Kills this process's children except `but`, and their descendants if this process adopts orphans."""
    spared = {*but}
    while killed := children() - spared:
        for pid in killed:
            try:
                os.kill(pid, signal.SIGKILL)
            except PermissionError:  # it runs as another user
                spared.add(pid)
        for pid in killed - spared:
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:  # reaped by a thread of the user's code
                spared.add(pid)


def _ended(child: int) -> bool:
    """Whether the child has ended; reaps orphans that have."""
    while (done := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and done.si_pid != child:
        os.waitpid(done.si_pid, 0)
    return done is not None


def _killed(child: int) -> int:
    """Kills the child, if it has not ended, and all that it has started. Returns its exit code."""
    os.kill(child, signal.SIGKILL)  # no effect if it has ended
    _, status = os.waitpid(child, 0)
    kill_children()
    return os.waitstatus_to_exitcode(status)


def _end_as(code: int) -> None:
    """Ends this process with the exit code; if it is negative, by that signal."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has dumped its own core
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


def _prctl(option: int, value: int) -> None:
    with suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(option, value)


def main() -> None:
    descriptor, module = int(sys.argv[1]), sys.argv[2]
    keep(descriptor)
    sys.argv[1:] = [sys.argv[1], *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
