"""Processes that run users' code: a new interpreter under a keeper, without our secrets, whose output is limited."""

import os
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress

from policy_trainer.processes.children import environment
from policy_trainer.processes.user_output import pass_on
from shared.process import PARENT_VARIABLE

_END_SECONDS = 5.0
# How long the last that a process wrote may take to reach standard error.
_READ_SECONDS = 1.0
_KEEPER = "policy_trainer.processes.keeper"
# Prefix of our own variables. Some hold secrets, and no code of the user's needs them.
_OURS = "TANDEM_"

# The thread that reads the output of a process.
_READERS: "weakref.WeakKeyDictionary[subprocess.Popen[bytes], threading.Thread]" = weakref.WeakKeyDictionary()


def start_python(module: str, descriptor: int, *arguments: object) -> subprocess.Popen[bytes]:
    """Runs a module in a new interpreter under a keeper, with the descriptor and the arguments. Its output goes to
    standard error, since this process's standard output may be piped to a program."""
    variables = {name: value for name, value in environment().items() if not name.startswith(_OURS)}
    variables |= {PARENT_VARIABLE: str(os.getpid()), "PYTHONPATH": os.pathsep.join([*sys.path, os.getcwd()])}
    process = subprocess.Popen(
        # -P: do not put the working directory first in sys.path, where a file may shadow a library. -u: output is not
        # lost when the process is killed.
        [sys.executable, "-P", "-u", "-m", _KEEPER, str(descriptor), module, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        pass_fds=[descriptor],
        env=variables,
        start_new_session=True,
    )
    reader = threading.Thread(target=pass_on, args=(process.stdout,), name="user output", daemon=True)
    _READERS[process] = reader
    reader.start()
    return process


def end_python(process: subprocess.Popen[bytes]) -> None:
    """Ends what `start_python` has started, with all that descends from it."""
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


def exit_status(code: int | None) -> str:
    """code: None while another thread is ending the process."""
    if code is None:
        return "which was stopped"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
