"""Judges inputs in separate processes, so that one that crashes, hangs or uses too much memory is found."""

import importlib
import random
import resource
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

MAX_SECONDS = 1.0
MAX_GROWTH = 512 * 2**20
# Address space beyond that of the process at its start: memory that is reserved but never touched counts as well.
_MAX_ADDRESSES = 2 * 2**30
_HANGS_SECONDS = 20.0
_REPORT_EVERY = 500
_MAX_FAILURES = 20
_STARTING = -1


@dataclass(frozen=True)
class Failure:
    """An input that caused a fault. reason: a traceback, or how the process ended."""

    index: int
    reason: str


@dataclass
class Outcome:
    """stages: number of inputs by stage; the last few hundred of a process that died are missing.

    slowest: CPU seconds of one input. growth: bytes by which a process grew at most.
    """

    stages: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    slowest: float = 0.0
    growth: int = 0

    @property
    def inputs(self) -> int:
        return self.stages.total() + len(self.failures)

    def add(self, other: "Outcome") -> None:
        self.stages += other.stages
        self.failures += other.failures
        self.slowest = max(self.slowest, other.slowest)
        self.growth = max(self.growth, other.growth)


def make(target: str, seed: int, index: int) -> bytes:
    """The input of this index, always the same for a seed."""
    module = importlib.import_module(f"tests.fuzz.{target}")
    return module.make(random.Random(f"{target} {seed} {index}"))


def fuzz(target: str, inputs: int, seed: int, processes: int) -> Iterator[Outcome]:
    """Judges the inputs 0 to `inputs` of a target; yields outcomes until _MAX_FAILURES inputs have failed."""
    make(target, seed, 0)  # fails at once if the fuzzer itself is broken
    workers = [_Worker(target, inputs, seed, first, processes) for first in range(processes)]
    failures = 0
    try:
        while workers and failures < _MAX_FAILURES:
            wait([worker.pipe for worker in workers], timeout=1.0)
            for worker in list(workers):
                for outcome in worker.outcomes():
                    failures += len(outcome.failures)
                    yield outcome
                if worker.finished:
                    workers.remove(worker)
    finally:
        for worker in workers:
            worker.kill()


class _Worker:
    """Judges every `step`-th input from `first` on, with a new process after one that died."""

    def __init__(self, target: str, inputs: int, seed: int, first: int, step: int) -> None:
        self._arguments = target, inputs, seed
        self._step = step
        self._context = get_context("spawn")
        self._at = self._context.RawValue("q", _STARTING)
        self.finished = False
        self._start(first)

    def _start(self, first: int) -> None:
        self._first, self._at.value = first, _STARTING
        self._seen, self._seen_at = _STARTING, time.monotonic()
        self.pipe, there = self._context.Pipe(duplex=False)
        self._process = self._context.Process(
            target=_judge_all, args=(*self._arguments, first, self._step, self._at, there), daemon=True
        )
        self._process.start()
        there.close()

    def outcomes(self) -> Iterator[Outcome]:
        """Outcomes since the last call; if the process has died or hangs, a failure, and a new process is started."""
        try:
            while self.pipe.poll():
                report = self.pipe.recv()
                if report is None:
                    self.finished = True
                    self._process.join()
                    return
                yield report
        except EOFError:
            self._process.join()
            assert self._process.exitcode != 1, "the fuzzer is broken: its traceback is above"
            yield self._give_up(f"the process ended with status {self._process.exitcode}")
            return
        if self._at.value != self._seen or self._at.value == _STARTING:
            self._seen, self._seen_at = self._at.value, time.monotonic()
        elif time.monotonic() - self._seen_at > _HANGS_SECONDS:
            self.kill()
            yield self._give_up(f"no answer within {_HANGS_SECONDS:.0f} s")

    def _give_up(self, reason: str) -> Outcome:
        index = max(self._at.value, self._first)
        self._start(index + self._step)
        return Outcome(failures=[Failure(index, reason)])

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _judge_all(target: str, inputs: int, seed: int, first: int, step: int, at: Any, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent, which kills this process
    warnings.simplefilter("ignore")  # duplicate names in archives are intended
    module = importlib.import_module(f"tests.fuzz.{target}")
    _bound_addresses()
    base, outcome = _peak(), Outcome()
    for index in range(first, inputs, step):
        at.value = index
        body = module.make(random.Random(f"{target} {seed} {index}"))
        began = time.process_time()
        try:
            stage = module.judge(body)
        except BaseException:  # a Rust panic is not an Exception
            outcome.failures.append(Failure(index, traceback.format_exc()))
        else:
            _note(outcome, index, stage, time.process_time() - began, _peak() - base)
            if outcome.growth > MAX_GROWTH:
                base = _peak()  # so that the growth does not count for the next input
        if outcome.inputs >= _REPORT_EVERY or outcome.failures:
            pipe.send(outcome)
            outcome = Outcome()
    pipe.send(outcome)
    pipe.send(None)


def _note(outcome: Outcome, index: int, stage: str, seconds: float, growth: int) -> None:
    if growth > MAX_GROWTH:
        outcome.failures.append(Failure(index, f"the process has grown by {growth / 2**20:.0f} MiB"))
    elif seconds > MAX_SECONDS:
        outcome.failures.append(Failure(index, f"took {seconds:.1f} s"))
    else:
        outcome.stages[stage] += 1
    outcome.slowest = max(outcome.slowest, seconds)
    outcome.growth = max(outcome.growth, growth)


def _bound_addresses() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + _MAX_ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _peak() -> int:
    """Largest resident memory so far. getrusage would also count that of the process which started this one."""
    with open("/proc/self/status", "rb") as file:
        return int(file.read().partition(b"VmHWM:")[2].split(maxsplit=1)[0]) * 1024
