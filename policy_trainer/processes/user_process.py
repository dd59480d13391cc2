"""Processes that run users' code: a new interpreter under a keeper, without our secrets, whose output is limited.

`concurrent.futures` does not fit: it cannot end one of its workers without the others, and it unpickles what they send.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from functools import partial

from policy_trainer.processes.messages import Connection
from policy_trainer.processes.user_output import pass_on
from policy_trainer.processes.variables import environment_of_users_code

_END_SECONDS = 5.0
# How long to wait until the last output of a process has reached standard error.
_READ_SECONDS = 1.0
_KEEPER = "policy_trainer.processes.keeper"
# The thread that reads the output of a process.
_READERS: "weakref.WeakKeyDictionary[subprocess.Popen[bytes], threading.Thread]" = weakref.WeakKeyDictionary()


class UserProcess:
    """A process that starts at once and ends with this object. It has its own session, so that Ctrl-C reaches only the
    parent.

    It is a new Python interpreter, not a fork: the parent may have threads.
    """

    def __init__(self, module: str, *, memory: int) -> None:
        """module: its main program calls `serve_parent`. memory: bytes of its address space, 0 for no limit."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = start_python(module, theirs.fileno(), memory)
        self._process = process
        connection = Connection(ours, partial(_end, process))
        self.ask, self.ask_each = connection.ask, connection.ask_each
        # Kills the process and all that it has started.
        self.end = weakref.finalize(self, connection.close)

    @property
    def alive(self) -> bool:
        with suppress(ChildProcessError):  # another thread has just ended it
            # WNOWAIT: do not reap it, so that its pid stays reserved for its process group.
            return self._process.returncode is None and not os.waitid(
                os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
            )
        return False


def start_python(module: str, descriptor: int, *arguments: object) -> subprocess.Popen[bytes]:
    """Runs a module in a new interpreter under a keeper, with the descriptor and the arguments. Its output goes to
    standard error, since this process's standard output may be piped to a program."""
    process = subprocess.Popen(
        # -P: do not put the working directory first in sys.path, where a file may shadow a library. -u: output is not
        # lost when the process is killed.
        [sys.executable, "-P", "-u", "-m", _KEEPER, str(descriptor), module, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        pass_fds=[descriptor],
        env=environment_of_users_code(),
        start_new_session=True,
    )
    reader = threading.Thread(target=pass_on, args=(process.stdout,), name="user output", daemon=True)
    _READERS[process] = reader
    reader.start()
    return process


def end_python(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that `start_python` has started, and all its descendants."""
    # On Linux the group is the keeper's, which kills the rest. Elsewhere there is no keeper, and the group has all that
    # the process has started; its number is not another's until the process is reaped.
    if sys.platform != "linux" and process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.terminate()  # no effect on a process that has already ended
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    reader = _READERS.get(process)
    if reader and reader is not threading.current_thread():  # where the garbage collector may call this
        reader.join(_READ_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> str:
    end_python(process)
    return f"ended the process, {exit_status(process.returncode)}"


def exit_status(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
