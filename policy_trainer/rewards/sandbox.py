"""Runs rewards that may hang or crash: a completion takes at most its time limit, and never stops the run."""

import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from policy_trainer.data.problem import Reward, Sample, Score
from policy_trainer.lifecycle.processes import environment
from policy_trainer.lifecycle.user_output import pass_on
from policy_trainer.rewards.call_log import CallLogs
from policy_trainer.rewards.failures import Failures, too_slow
from shared.errors import UserError
from shared.process import PARENT_VARIABLE

# Time limit for imports and grammars, before the first judgement; a user's module may be slow to load.
_START_SECONDS = 300.0
_END_SECONDS = 5.0
# How long the last that a process wrote may take to reach standard error.
_READ_SECONDS = 1.0
_KEEPER = "policy_trainer.lifecycle.keeper"
# Lines of answers are shorter, unless a function writes to the socket itself.
_MOST_BYTES = 2**28
# Prefix of our own variables. Some hold secrets, and no code of the user's needs them.
_OURS = "TANDEM_"

# The thread that reads the output of a process.
_READERS: "weakref.WeakKeyDictionary[subprocess.Popen[bytes], threading.Thread]" = weakref.WeakKeyDictionary()


class ProcessEnded(Exception):
    """The process took too long and was killed, or it ended by itself. The message says which."""

    def __init__(self, message: str, *, too_slow: bool = False) -> None:
        super().__init__(message)
        self.too_slow = too_slow


@dataclass(frozen=True)
class Sandboxed:
    """A reward that runs in the sandbox process, where it may be killed. All of it must be picklable.

    score: one of our rules, or a user's function, `module:function`, which the process imports. prepare: slow set-up
    that must not count towards a completion's time limit. cut_off: the score of a completion for which the process
    ended: the failing score if only the completion can be the cause, else NaN.
    """

    score: Reward | str
    prepare: Callable[[], object] | None = None
    cut_off: float = math.nan


class Sandbox:
    """Judges by sandboxed rewards. When a reward fails on a completion, this is logged and counted."""

    def __init__(self, rewards: Mapping[str, Sandboxed], *, seconds: float, memory: int, workers: int = 1) -> None:
        """rewards: by name; if there are none, no process is started. seconds: time limit of one completion and one
        reward. memory: bytes that a process may use, 0 for no limit. workers: processes that judge in parallel; all but
        the first start when they are first needed.

        Raises UserError for a reward that cannot be loaded.
        """
        self.failures = Failures(rewards)
        self.logs = CallLogs()
        self._lanes = [_Lane(rewards, self.failures, self.logs, seconds, memory) for _ in range(workers)]
        if rewards:
            self._lanes[0].start()

    def scores(self, name: str, samples: Sequence[Sample]) -> list[Score]:
        """One score for each sample. Raises UserError for a reward that has failed on every completion so far."""
        workers = 1 if self._lanes[0].judges_together(name) else min(len(self._lanes), len(samples))
        if workers < 2:
            return self._lanes[0].scores(name, samples)
        scores: list[Score] = [math.nan] * len(samples)
        with ThreadPoolExecutor(workers, thread_name_prefix="sandbox") as threads:
            shares = [
                threads.submit(lane.scores, name, samples[k::workers]) for k, lane in enumerate(self._lanes[:workers])
            ]
            try:
                for k, share in enumerate(shares):
                    scores[k::workers] = share.result()
            except BaseException:  # the executor waits for its threads: none shall continue judging
                for lane in self._lanes:
                    lane.stop()
                raise
        return scores


class _Lane:
    """One process at a time, and the samples that it judges one after the other."""

    def __init__(
        self, rewards: Mapping[str, Sandboxed], failures: Failures, logs: CallLogs, seconds: float, memory: int
    ) -> None:
        self._rewards = rewards
        self._failures = failures
        self._logs = logs
        self._seconds = seconds
        self._memory = memory
        self._process: SandboxProcess | None = None
        self._stopped = threading.Event()
        self._together: frozenset[str] = frozenset()
        self._calls = 0

    def judges_together(self, name: str) -> bool:
        """Whether the reward takes many completions in one call."""
        return name in self._together

    def scores(self, name: str, samples: Sequence[Sample]) -> list[Score]:
        self._stopped.clear()
        scores: list[Score] = []
        while len(scores) < len(samples):
            process = self.start()
            rest = samples[len(scores) :]
            size = len(rest) if self.judges_together(name) else 1
            try:
                numbers = range(self._calls, self._calls + len(rest) // size)
                self._calls = numbers.stop
                process.send((numbers.start, name, list(rest)), seconds=self._seconds * len(rest))
                for number in numbers:
                    answers = process.receive(seconds=self._seconds * size, number=number)["answers"]
                    self._logs.add(samples[len(scores) :], answers)
                    scores.extend(self._failures.scores(name, answers))
            except ProcessEnded as ended:
                if self._stopped.is_set():
                    break
                reason = too_slow(self._seconds, size) if ended.too_slow else str(ended)
                self._failures.lost(name, reason, count=size)
                scores.extend([self._rewards[name].cut_off] * size)
            except BaseException:  # pending answers would be read as those of later completions
                process.end()
                raise
        return scores

    def stop(self) -> None:
        """Ends the process, and `scores` of another thread with it."""
        self._stopped.set()
        if self._process is not None:
            self._process.end()

    def start(self) -> "SandboxProcess":
        """A process whose rewards are loaded. Starts one if none is alive: it may have been killed while idle, when the
        machine ran out of memory."""
        if self._process is None or not self._process.alive:
            self._process = SandboxProcess(memory=self._memory, seconds=self._seconds)
            try:
                self._load(self._process)
            except BaseException:  # a process that has not loaded them must not be used
                self._process.end()
                raise
        return self._process

    def _load(self, process: "SandboxProcess") -> None:
        """Sends the rewards and waits until they are loaded."""
        scores = {name: reward.score for name, reward in self._rewards.items()}
        preparations = [reward.prepare for reward in self._rewards.values() if reward.prepare]
        try:
            process.send((scores, preparations), seconds=_START_SECONDS)
            answer = process.receive(seconds=_START_SECONDS)
        except ProcessEnded as ended:
            raise UserError(f"rewards: loading {', '.join(self._rewards)} {ended}") from None
        if "refused" in answer:
            raise UserError(*answer["refused"])
        self._together = frozenset(answer["together"])


class SandboxProcess:
    """Starts at once and ends with this object. It has its own session, so that Ctrl-C reaches only the parent.

    It is a new Python interpreter, not a fork: the parent may have threads.
    """

    def __init__(self, *, memory: int, seconds: float, module: str = "policy_trainer.rewards.sandbox_child") -> None:
        """memory: limit of its address space in bytes, 0 for none. seconds: time limit of one judgement. module: the
        module to run, with a socket's descriptor, memory and seconds as arguments."""
        self._socket, theirs = socket.socketpair()
        self._lines = self._socket.makefile("rb")
        with theirs:
            arguments = theirs.fileno(), memory, seconds
            self._process = start_python(module, *arguments)
        # Kills the process and its children.
        self.end = weakref.finalize(self, _end, self._process, self._socket, self._lines)

    @property
    def alive(self) -> bool:
        # WNOWAIT: do not reap it, so that its pid stays reserved for its process group.
        return self.end.alive and not os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def send(self, request: Any, *, seconds: float) -> None:
        """Raises ProcessEnded if the request cannot be sent within `seconds`."""
        with self._within(seconds):
            self._socket.sendall(pickle.dumps(request))

    def receive(self, *, seconds: float, number: int | None = None) -> dict[str, Any]:
        """The next answer, or the one with this `number`. Raises ProcessEnded if none arrives within `seconds`."""
        deadline = time.monotonic() + seconds
        with self._within(seconds):
            while (line := self._lines.readline(_MOST_BYTES)).endswith(b"\n"):
                if (answer := read_answer(line, number)) is not None:
                    return answer
                self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            raise EOFError

    @contextmanager
    def _within(self, seconds: float) -> Iterator[None]:
        self._socket.settimeout(seconds)
        try:
            yield
        except TimeoutError:
            self.end()
            raise ProcessEnded(f"took more than {seconds:g} s", too_slow=True) from None
        except (EOFError, OSError):
            self.end()
            raise ProcessEnded(f"ended the process, {exit_status(self._process.returncode)}") from None


def read_answer(line: bytes | bytearray, number: int | None) -> dict[str, Any] | None:
    """The answer with this number; None for lines that the user's code has written to the socket by mistake."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and number in (None, answer.get("number")) else None


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


def _end(process: subprocess.Popen[bytes], connection: socket.socket, lines: BinaryIO) -> None:
    lines.close()
    connection.close()
    end_python(process)


def exit_status(code: int | None) -> str:
    """code: None while another thread is ending the process."""
    if code is None:
        return "which was stopped"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
