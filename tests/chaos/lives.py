"""A trainer that is repeatedly killed at chosen moments and resumed."""

import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from policy_trainer.reporting.metrics import read_metrics
from policy_trainer.run_files.checkpoint import Checkpoints, read_state


class Life(Protocol):
    """What runs in one life. kill: by SIGKILL; the exit status is -9 unless it had ended by itself."""

    @property
    def running(self) -> bool: ...
    def kill(self) -> int: ...
    def wait(self, seconds: float) -> int: ...


class Starts(Protocol):
    def start(self, module: str, arguments: Sequence[str], log: Path) -> Life: ...


@dataclass(frozen=True)
class Crash:
    """SIGKILL, `seconds` after a life of the trainer has reached the moment `at`.

    start: it was started. step: it has recorded `steps` steps. checkpoint: it has then begun to write one. end: the
    checkpoint of the last step is complete, its batches most likely not acked yet.
    """

    at: Literal["start", "step", "checkpoint", "end"]
    steps: int
    seconds: float


@dataclass
class Lives:
    """Counts over the lives of the killed trainer."""

    crashes: int = 0
    in_checkpoint: int = 0
    steps_repeated: int = 0


def plan_crashes(cycles: int, chance: random.Random) -> list[Crash]:
    """Most are within a few steps of a start, half of those while a checkpoint is written; the last is at the end."""
    kinds = {
        "start": lambda: Crash("start", 0, chance.uniform(0, 1.5)),
        "step": lambda: Crash("step", chance.randint(1, 4), chance.uniform(0, 0.06)),
        "checkpoint": lambda: Crash("checkpoint", chance.randint(1, 3), chance.uniform(0, 0.03)),
    }
    order = ("checkpoint", "step", "checkpoint", "step", "start")
    crashes = [kinds[order[i % len(order)]]() for i in range(cycles - 1)]
    return [*crashes, Crash("end", 0, chance.uniform(0, 0.003))][:cycles]


class Trainer:
    """`policy-trainer train` in one run's directory, started several times."""

    def __init__(self, launcher: Starts, run_dir: Path, steps: int, *options: str) -> None:
        self._launcher = launcher
        self._arguments = ("train", "--run-dir", str(run_dir), "--max-steps", str(steps), "--resume", *options)
        self._log = run_dir.with_suffix(".log")
        self._read: tuple[tuple[int, int], list[tuple[int, int]]] = ((0, 0), [])
        self.run_dir = run_dir
        self.steps = steps

    def start(self) -> Life:
        return self._launcher.start("policy_trainer.__main__", self._arguments, self._log)

    def finish(self) -> None:
        """Starts it and lets it run to the last step."""
        status = self.start().wait(600)
        assert status == 0, self._log.read_text()

    def records(self) -> list[tuple[int, int]]:
        """Epoch and step of every step in metrics.jsonl."""
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return []
        now = path.stat()
        if (now.st_size, now.st_mtime_ns) != self._read[0]:  # it is asked every millisecond
            records = [record for record in read_metrics(path) if record["kind"] == "step"]
            self._read = (now.st_size, now.st_mtime_ns), [(record["epoch"], record["step"]) for record in records]
        return self._read[1]

    def half_written(self) -> set[tuple[str, int]]:
        """Incomplete checkpoints, each with the time of its last change."""
        found = (self.run_dir / "checkpoints").glob(".tmp-*")
        with suppress(FileNotFoundError):  # it has just been completed
            return {(path.name, path.stat().st_mtime_ns) for path in found}
        return set()

    def saved_steps(self) -> int:
        """The step of the newest checkpoint, from which the next life continues."""
        newest = Checkpoints(self.run_dir / "checkpoints", keep=1).newest()
        return read_state(newest).step if newest else 0


class _Life:
    """One life of a trainer, which has a later epoch than the one before."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._epoch = max(trainer.records(), default=(-1, 0))[0]
        self._leftovers = trainer.half_written()
        self.process = trainer.start()

    @property
    def writes_checkpoint(self) -> bool:
        return bool(self._trainer.half_written() - self._leftovers)

    def has_come_to(self, crash: Crash) -> bool:
        steps = [step for epoch, step in self._trainer.records() if epoch > self._epoch]
        if crash.at == "end":
            return self._trainer.saved_steps() == self._trainer.steps
        return len(steps) >= crash.steps and (crash.at != "checkpoint" or self.writes_checkpoint)


def crash_and_resume(trainer: Trainer, plan: Sequence[Crash]) -> Lives:
    """Carries out the plan, and then trains to the last step."""
    lives = Lives()
    for crash in plan:
        life = _Life(trainer)
        while life.process.running and not life.has_come_to(crash):
            time.sleep(0.001)
        time.sleep(crash.seconds)
        lives.crashes += life.process.kill() == -signal.SIGKILL
        lives.in_checkpoint += life.writes_checkpoint
        lives.steps_repeated += len(trainer.records()) - trainer.saved_steps()
    trainer.finish()
    return lives
