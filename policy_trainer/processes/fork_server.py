"""A process that imports PyTorch and transformers once, and forks the reference servers and workers of runs, which
start within milliseconds.

It runs no code of the user's, has no thread and has not touched a GPU when it forks. It ends with its parent, and its
children notice that as those of `python -m` do. Linux only.
"""

import atexit
import ctypes
import fcntl
import gc
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policy_trainer.processes.forking import ForkedProcess, Forks
from policy_trainer.processes.messages import Connection, ProcessEnded
from policy_trainer.processes.variables import environment, in_torchrun
from shared.process import PARENT_VARIABLE, quick_imports

if TYPE_CHECKING:  # the settings load late: starting a process does not wait for them
    from policy_trainer.config import TrainConfig

# After so many seconds a child is started by `python -m`: imports on a slow disk may hang.
_IMPORT_SECONDS = 120.0
# PyTorch, transformers and their libraries read these when they are imported.
_READ_AT_IMPORT = (
    "ATEN_", "GOMP_", "HF_", "KMP_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH_",
    "TRANSFORMERS_",
)  # fmt: skip
_PATH = "PYTHONPATH"  # which a forked child takes over
# Devices of NVIDIA's and AMD's drivers.
_GPUS = ("nvidia[0-9]*", "kfd", "dxg")
# Modules that the children need. Importing them reads no environment variables and starts no thread.
_MODULES = ("shared.models", "policy_trainer.cli.training", "policy_trainer.rollout.run", "ref_server.cli.serve")
# Room for the command line of a child, as `ps` shows it.
_ROOM = 4096


class ForkServer:
    """The parent's handle of the process: it starts the process, and asks it to fork."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._imported = _read_at_import(environment)
        self._owner = os.getpid()
        self._forked: list[ForkedProcess] = []
        control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), " " * _ROOM],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(control, self._kill)
        atexit.register(self.close)

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        log: int,
        environment: Mapping[str, str],
        inherited: Sequence[int],
    ) -> ForkedProcess | None:
        """Runs `python -m module` in a new process, with a session of its own. Returns once it has begun.

        log: a file descriptor, for its output. inherited: file descriptors that it gets under the same numbers.
        Returns None if the module must be started in another way: the fork server has ended, or variables that PyTorch
        reads when it is imported have changed.
        """
        if not self.serves(environment):
            return None
        request = {
            "command": [module, *arguments],
            "environment": {**environment, PARENT_VARIABLE: str(self._process.pid)},
            "directory": os.getcwd(),
            "inherited": [*inherited],
        }
        # If it does not answer in time it is killed: a child must not begin later, when another has been started.
        with suppress(OSError, ProcessEnded):
            child = ForkedProcess(self._connection.ask, _IMPORT_SECONDS, [log, *inherited], **request)
            self._forked.append(child)
            return child
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
        self._connection.close()

    def _kill(self) -> str:
        self._process.kill()
        self._process.wait()
        return "ended the process"


# The fork server of this process, between runs.
_kept: list[ForkServer] = []


@contextmanager
def fork_server(config: "TrainConfig") -> Iterator[ForkServer | None]:
    """The fork server, which forks the run's children if they use PyTorch on the CPU. It stays for the next run, until
    this process ends. Enter before PyTorch is imported here, so that both processes import it at the same time."""
    from policy_trainer.config import INLINE

    scores = config.server == INLINE and config.scored_by_server
    samples = config.rollout == INLINE and config.sampler_traits.can_fork
    reference_on_cpu = config.reference.device in ("cpu", "auto")  # auto: where the policy is
    if not (_can_fork(config.device) and reference_on_cpu and (scores or samples)):
        yield None
        return
    server = _take()
    try:
        yield server
    finally:
        if server.idle and not _kept:
            _kept.append(server)
        else:  # one is enough; closing it ends children that could not be stopped
            server.close()


def prepare_fork_server(device: str) -> None:
    """Starts the fork server for a later run on the device, so that it imports PyTorch in the meantime."""
    if _can_fork(device):
        _kept.append(_take())


def _can_fork(device: str) -> bool:
    on_cpu = device == "cpu" or (device == "auto" and not _may_have_gpu())
    return sys.platform == "linux" and not in_torchrun() and on_cpu


def _may_have_gpu() -> bool:
    return any(any(Path("/dev").glob(names)) for names in _GPUS)


def _take() -> ForkServer:
    """The kept fork server if it suits the current environment, else a new one."""
    while _kept:
        if (server := _kept.pop()).serves(environment()):
            return server
        server.close()
    return ForkServer(environment())


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_IMPORT) and name != _PATH}


def _become_child(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Gives this process what `python -P -m` would start with: descriptors, environment, directory, random seeds."""
    places = [1, 2, *request["inherited"]]
    above = max(*places, *descriptors) + 1
    log, *others = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, place in zip([log, log, *others], places, strict=True):
        os.dup2(descriptor, place)
    for descriptor in (log, *others):
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    if paths := os.environ.get(_PATH):
        sys.path[:] = dict.fromkeys([*(path or os.getcwd() for path in paths.split(os.pathsep)), *sys.path])
    # Otherwise all children would draw the same numbers. Python seeds its own at the fork.
    import_module("numpy").random.seed()
    import_module("torch").seed()
    _show(request["command"])


def _show(command: Sequence[str]) -> None:
    """Writes the command over this process's arguments, so that `ps` shows what runs here."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    shown = b"\0".join(os.fsencode(part) for part in [sys.executable, "-P", "-m", *command])
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
        begun = Forks(control).serve()
    if begun is None:
        os._exit(0)  # its children notice that, and may finish what they do
    request, descriptors = begun
    _become_child(request, descriptors)
    command = request["command"]
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
