"""Child processes of the trainer and of the demo, and restarts of those that die."""

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from policy_trainer.lifecycle.endings import RunFailed
from policy_trainer.processes.fork_server import ForkedProcess, ForkServer
from shared.errors import printable
from shared.process import child_environment

if TYPE_CHECKING:  # the settings load late: starting a process does not wait for them
    from policy_trainer.config import TrainConfig

_LAST_LINES = 12
# A log that exceeds the first size is cut to the second: a user's code may print a lot.
_MOST_LOG, _KEPT_LOG = 2**26, 2**20
# What torchrun sets for each rank (torch.distributed.elastic of PyTorch 2.8 to 2.13): a child that had these
# would take itself for that rank.
_TORCHRUN = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_TIMER_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
}  # fmt: skip
# Devices of NVIDIA's and AMD's drivers.
_GPUS = ("nvidia[0-9]*", "kfd", "dxg")
# Longer than a reference server takes to shut down.
_STOP_SECONDS = 35.0

# After this many deaths in a row, a restart does not help.
_MAX_DEATHS = 5
# Exit status of a command that refuses its settings or data: another start would end the same way.
_REFUSED = 2


def in_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


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


class Child:
    """Runs a Python module as a child process, with its output in a log file. It ends when this process ends.

    It has its own session, so that Ctrl-C reaches only this process, which then stops it.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        secrets: Mapping[str, str] | None = None,
        inherited: Sequence[int] = (),
        forks: ForkServer | None = None,
    ) -> None:
        """secrets: environment variables that the child gets in addition. inherited: file descriptors that it keeps
        open, as of a lock. forks: starts the child with PyTorch imported, if it can."""
        self.name = name
        self._module = module
        self._arguments = arguments
        self._log = log
        self._secrets = secrets or {}
        self._inherited = inherited
        self._forks = forks
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._start = 0
        self._terminated = False

    def start(self) -> None:
        self._terminated = False
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._start = log.tell()
            what = self._module, self._arguments, log.fileno(), {**environment(), **self._secrets}, self._inherited
            self._process = (self._forks and self._forks.fork(*what)) or _run(*what)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._process.poll() if self._process else None

    def last_lines(self) -> str:
        """The last lines of its output since it was last started, with control characters escaped."""
        lines = self._log.read_bytes()[self._start :].decode(errors="replace").splitlines()
        return "\n".join(map(printable, lines[-_LAST_LINES:]))

    def bound_log(self) -> None:
        """Drops the beginning of a log that has become too long. The child appends to it."""
        with suppress(FileNotFoundError):
            if self._log.stat().st_size > _MOST_LOG:
                with self._log.open("r+b") as log:
                    log.seek(-_KEPT_LOG, os.SEEK_END)
                    kept = log.read().partition(b"\n")[2]
                    log.truncate(0)
                with self._log.open("ab") as log:
                    log.write(b"[the beginning of this log is left out]\n" + kept)
                self._start = 0

    def terminate(self) -> None:
        """Sends SIGTERM, but only once: a second signal would interrupt a server that is shutting down."""
        if self._process is not None and not self._terminated:
            self._terminated = True
            self._process.terminate()

    def stop(self) -> None:
        """Sends SIGTERM, and SIGKILL if the child has not ended after _STOP_SECONDS."""
        self.terminate()
        if self._process is None:
            return
        try:
            self._process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _run(
    module: str, arguments: Sequence[str], log: int, environment: Mapping[str, str], inherited: Sequence[int]
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
        pass_fds=inherited,
    )


def environment() -> dict[str, str]:
    """For a child: this process's environment without settings, which would override the child's configuration file,
    and under torchrun without the variables of this rank. Threads of PyTorch's that wait leave the core to the other
    processes of the run, unless the user wants them to spin."""
    of_rank = _TORCHRUN if in_torchrun() else set[str]()
    return {"OMP_WAIT_POLICY": "PASSIVE"} | {
        name: value
        for name, value in child_environment().items()
        if name not in of_rank and not name.startswith(("POLICY_TRAINER_", "REF_SERVER_"))
    }


class RestartedChild:
    """Restarts a child that has died, after pauses of 1, 2, 4 and 8 seconds. Safe to check from any thread."""

    def __init__(
        self, child: Child, note: Callable[[str], None], *, futile: str = "", lasting: float = math.inf
    ) -> None:
        """futile: in the last error, what the child did not do. lasting: seconds of a life after which deaths are
        counted anew, besides `succeeded`."""
        self._child = child
        self._note = note
        self._futile = futile
        self._lasting = lasting
        self._deaths = 0
        self._born = 0.0
        self._not_before = 0.0
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        return self._child.pid

    @property
    def exit_report(self) -> str | None:
        """How the child died, with its last output; None while it runs."""
        status = self._child.exit_status
        if status is None:
            return None
        return f"the {self._child.name} died with status {status}; its last output:\n{self._child.last_lines()}"

    def start(self) -> None:
        self._not_before, self._born = 0.0, time.monotonic()
        self._child.start()

    def check(self) -> None:
        """Starts a dead child again, after a pause. Raises RunFailed if that does not help."""
        with self._lock:
            self._child.bound_log()
            exit_report = self.exit_report
            if exit_report is None:
                return
            if not self._not_before:
                self._rest(exit_report)
            if time.monotonic() >= self._not_before:
                self.start()

    def succeeded(self) -> None:
        """Call it when the child has done its work: deaths are counted anew."""
        self._deaths = 0

    def terminate(self) -> None:
        self._child.terminate()

    def stop(self) -> None:
        self._child.stop()

    def _rest(self, exit_report: str) -> None:
        self._deaths = 1 if time.monotonic() - self._born >= self._lasting else self._deaths + 1
        if self._child.exit_status == _REFUSED:
            raise RunFailed(exit_report)
        if self._deaths >= _MAX_DEATHS:
            raise RunFailed(f"{exit_report}\nit died {self._deaths} times{self._futile}")
        self._note(f"{exit_report}\nstarting it again")
        self._not_before = time.monotonic() + 2.0 ** (self._deaths - 1)
