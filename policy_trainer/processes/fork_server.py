"""A process that imports PyTorch and transformers once, and forks the reference servers and workers of runs, which
start within milliseconds.

It does nothing else and runs no code of the user's: it has no thread and has not touched a GPU when it forks. It ends
with its parent, and its children notice that as those of `python -m` do. Linux only.
"""

import atexit
import ctypes
import fcntl
import gc
import json
import multiprocessing.connection
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from shared.process import PARENT_VARIABLE, quick_imports

# Seconds between looks whether its parent is there.
_TICK = 0.5
# After so many seconds a child is started by `python -m`: imports on a slow disk may hang.
_IMPORT_SECONDS = 120.0
# The most bytes of a request: an environment, mostly. A larger one is refused.
_MOST_BYTES = 2**20
# PyTorch, transformers and their libraries read these when they are imported.
_READ_AT_IMPORT = (
    "ATEN_", "GOMP_", "HF_", "KMP_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH_",
    "TRANSFORMERS_",
)  # fmt: skip
_PATH = "PYTHONPATH"  # which a forked child takes over
# Modules that the children need. Importing them reads no environment variables and starts no thread.
_MODULES = ("shared.models", "policy_trainer.cli.training", "policy_trainer.rollout.run", "ref_server.cli.serve")
# Room for the command line of a child, as `ps` shows it.
_ROOM = 4096


class ForkServer:
    """The process, seen from its parent."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._imported = _read_at_import(environment)
        self._owner = os.getpid()
        self._forked: list[ForkedProcess] = []
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), " " * _ROOM],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self.close)

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        log: int,
        environment: Mapping[str, str],
        inherited: Sequence[int],
    ) -> "ForkedProcess | None":
        """Runs `python -m module` in a new process, with a session of its own. Returns once it has begun.

        log: a file descriptor, for its output. inherited: file descriptors that it gets under the same numbers.
        None if it must be started in another way: this process is gone, or variables that PyTorch reads when it is
        imported have changed.
        """
        if not self.serves(environment):
            return None
        request = {
            "command": [module, *arguments],
            "environment": {**environment, PARENT_VARIABLE: str(self._process.pid)},
            "directory": os.getcwd(),
            "inherited": [*inherited],
        }
        life, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, suppress(OSError):  # it is gone, or the request too large
            socket.send_fds(self._control, [json.dumps(request).encode()], [theirs.fileno(), log, *inherited])
        life.settimeout(_IMPORT_SECONDS)
        try:
            pid = life.recv(32)
        except TimeoutError:  # it must not begin later, when another has been started
            pid = b""
            self._process.kill()
        if pid:
            life.settimeout(None)
            self._forked.append(child := ForkedProcess(int(pid), life))
            return child
        life.close()
        return None

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether it can fork a child of the current process with this environment."""
        mine = self._owner == os.getpid() and self._process.poll() is None
        return mine and _read_at_import(environment) == self._imported

    @property
    def idle(self) -> bool:
        """Whether all processes that it has forked have ended."""
        self._forked = [child for child in self._forked if child.poll() is None]
        return not self._forked

    def close(self) -> None:
        """Ends it and all processes that it has forked. Called automatically when the process that started it exits."""
        if self._owner != os.getpid():  # a fork of the process that started it
            return
        atexit.unregister(self.close)
        self._process.kill()
        self._process.wait()
        self._control.close()


class ForkedProcess:
    """What the fork server has started, with the methods of `subprocess.Popen` that a parent uses. Thread-safe."""

    def __init__(self, pid: int, life: socket.socket) -> None:
        """life: brings the exit status. It is closed once the process and the fork server are gone."""
        self.pid = pid
        self._life = life
        self._status: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired."""
        if (status := self._look(timeout)) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return status

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _look(self, timeout: float | None) -> int | None:
        with self._lock:
            if self._status is None and multiprocessing.connection.wait([self._life], timeout):
                status = self._life.recv(32)
                self._status = int(status) if status else -signal.SIGKILL  # the fork server was killed first
                self._life.close()
            return self._status


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_IMPORT) and name != _PATH}


class _Server:
    """In the process itself."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._parent = os.getppid()
        self._children: dict[int, tuple[int, int]] = {}  # by a descriptor of the process: its pid and its life

    def serve(self) -> list[str] | None:
        """Until the parent is gone; then None. Returns also in each child, with the command that it has to run."""
        while os.getppid() == self._parent:
            ready, _, _ = select.select([self._control, *self._children], [], [], _TICK)
            if self._control in ready:
                message, descriptors, _, _ = socket.recv_fds(self._control, _MOST_BYTES, 64)
                if not message:
                    break
                if command := self._fork(json.loads(message), descriptors):
                    return command
            for child in self._children.keys() & {*ready}:
                self._bury(child)
        return None

    def _fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> list[str] | None:
        """In the child, the command."""
        pid = -1
        with suppress(OSError):  # no memory: the parent sees that the life ends
            pid = os.fork()
        if pid == 0:
            self._become_child(request, descriptors)
            return request["command"]
        life, *others = descriptors
        for descriptor in others:
            os.close(descriptor)
        if pid < 0:
            os.close(life)
        else:
            self._children[os.pidfd_open(pid)] = pid, life
            _tell(life, pid)
        return None

    def _bury(self, child: int) -> None:
        pid, life = self._children.pop(child)
        _, status = os.waitpid(pid, 0)
        _tell(life, os.waitstatus_to_exitcode(status))
        os.close(life)
        os.close(child)

    def _become_child(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """What `python -m` would find: its session, descriptors, environment, directory and random numbers."""
        os.setsid()
        self._control.close()
        for child, (_, life) in self._children.items():
            os.close(child)
            os.close(life)
        places = [1, 2, *request["inherited"]]
        above = max(*places, *descriptors) + 1
        _, log, *others = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in descriptors]  # its life stays
        for descriptor in descriptors:
            os.close(descriptor)
        for descriptor, place in zip([log, log, *others], places, strict=True):
            os.dup2(descriptor, place)
        for descriptor in (log, *others):
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        paths = os.environ.get(_PATH, "").split(os.pathsep)
        sys.path[:] = dict.fromkeys([os.getcwd(), *filter(None, paths), *sys.path[1:]])
        # Otherwise all children would draw the same numbers. Python seeds its own at the fork.
        import_module("numpy").random.seed()
        import_module("torch").seed()
        _show(request["command"])


def _tell(life: int, number: int) -> None:
    with suppress(OSError):  # the parent is gone, or does not listen any more
        os.write(life, str(number).encode())


def _show(command: Sequence[str]) -> None:
    """Writes the command over this process's arguments, so that `ps` shows what runs here."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    shown = b"\0".join(os.fsencode(part) for part in [sys.executable, "-m", *command])
    room = end - start
    ctypes.memmove(start, shown[: room - 1].ljust(room, b"\0"), room)


def _sampler_modules() -> list[str]:
    from policy_trainer.config.samplers import SAMPLERS  # late: the parent process does not wait for the settings

    return [traits.location.partition(":")[0] for traits in SAMPLERS.values() if traits.can_fork]


def main(descriptor: int) -> None:
    status: Any = 1  # after an uncaught exception

    @atexit.register  # registered first, so that it is called last
    def end() -> None:
        """Ends the process at once: freeing all imported modules first would take most of a second."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)

    with socket.socket(fileno=descriptor) as control:
        with quick_imports():
            for module in (*_MODULES, *_sampler_modules()):
                import_module(module)
        assert not import_module("torch").cuda.is_initialized() and threading.active_count() == 1
        gc.freeze()  # the children share the memory of all current objects
        command = _Server(control).serve()
    if command is None:
        os._exit(0)
    sys.argv[1:] = command[1:]
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ending:
        if ending.code is None or isinstance(ending.code, int):  # otherwise a message, which Python prints
            status = ending.code or 0
        raise


if __name__ == "__main__":
    main(int(sys.argv[1]))
