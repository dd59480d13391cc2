"""A policy on several ranks, any process of which is killed, ends with the weights of an uninterrupted run.

torchrun starts one to three ranks. SIGKILL hits one of them, or torchrun itself: all processes must end soon, and the
job is resumed on another number of ranks, or in one process without torchrun. As in `resume`, all jobs train on the
same queue, which is filled beforehand.
"""

import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch

from tests.chaos import resume
from tests.chaos.resume import Crash, Ending, Lives, crash_and_resume
from tests.chaos.stage import Proof, Stage
from tests.harness.processes import Process, processes_of
from tests.harness.server import Server

BAR = (
    "kill -9 of torchrun or of any rank: no process stays, the dead rank is named, 0 batches lost or doubled, and the "
    "weights of an uninterrupted run: to the bit on as many ranks, to 1e-6 on others"
)

_TORCHRUN = "torchrun"
# 0: one process without torchrun.
_RANKS = (0, 1, 2, 3)
_FIXED = (2,)
_FIXED_SHARE = 5
_ORDER = ("checkpoint", "step", "checkpoint", "step", "start", "checkpoint")
# Orphans train on until they have looked for torchrun.
_STEPS_PER_CRASH = 16
_TOLERANCE = 1e-6
# torchrun kills ranks half a minute after its SIGTERM.
_LONGEST_END = 60.0
_OPTIONS = (*resume.OPTIONS, "--device", "cpu", "--rank-timeout-seconds", "45", "--optimizer.learning-rate", "1e-4")


@dataclass(frozen=True)
class Kill:
    """One SIGKILL. victim: torchrun, or the number of a rank. ranks: 0 for one process without torchrun, which is the
    victim then. single: no other process of the job was there.

    seconds: until none was left. words: what the job wrote.
    """

    victim: str
    ranks: int
    single: bool
    seconds: float
    words: str

    @property
    def named(self) -> bool:
        """Whether the job says what died."""
        if self.victim == _TORCHRUN:
            return self.single or "torchrun has ended" in self.words or "the model is in" in self.words
        return re.search(rf"rank\s+: {self.victim} .*\n\s+exitcode\s+: -9 ", self.words) is not None


class Job:
    """torchrun with its ranks, or one process. victim: whom `kill` kills; the first where no such rank has begun."""

    def __init__(self, arguments: Sequence[str], log: Path, run_dir: Path, ranks: int, victim: str) -> None:
        self._run_dir, self._ranks, self._victim = run_dir, ranks, victim
        self._begin = log.stat().st_size if log.exists() else 0
        # Without `--` torchrun takes `--run` for an option of its own.
        launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "--")
        module, *more = (*(launcher if ranks else ()), "policy_trainer", *arguments)
        self._first = Process(module, *more, log=log)
        self.killed: Kill | None = None

    @property
    def running(self) -> bool:
        return self._first.popen.poll() is None

    def wait(self, seconds: float) -> int:
        return self._first.wait(seconds)

    def kill(self) -> int:
        if not self.running:
            return self.wait(0)
        pids = _ranks_of(self._run_dir)
        victim = self._victim if self._victim in pids else _TORCHRUN
        began = time.monotonic()
        os.kill(pids.get(victim, self._first.popen.pid), signal.SIGKILL)
        seconds = self._end(began)
        words = self._first.log.read_bytes()[self._begin :].decode(errors="replace")
        self.killed = Kill(victim, self._ranks, not pids, seconds, words)
        return -signal.SIGKILL

    def _end(self, began: float) -> float:
        """Seconds until all processes have ended; after _LONGEST_END they are killed."""
        while self.running or processes_of(self._run_dir):
            if time.monotonic() - began > _LONGEST_END:
                self.clear()
                return time.monotonic() - began
            time.sleep(0.05)
        return time.monotonic() - began

    def clear(self) -> None:
        self._first.kill()
        for pid in processes_of(self._run_dir):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _ranks_of(run_dir: Path) -> dict[str, int]:
    """Processes by their rank."""
    pids = {}
    for pid in processes_of(run_dir):
        with suppress(OSError):  # it has just ended
            if rank := re.search(rb"\0RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes()):
                pids[rank[1].decode()] = pid
    return pids


class Torchrun:
    """Starts jobs on a number of ranks out of `numbers`, and chooses who of each is to be killed."""

    def __init__(self, run_dir: Path, numbers: Sequence[int], chance: random.Random) -> None:
        self._run_dir, self._numbers, self._chance = run_dir, numbers, chance
        self.jobs: list[Job] = []

    def start(self, arguments: Sequence[str], log: Path) -> Job:
        ranks = self._chance.choice(self._numbers)
        follower = str(self._chance.randrange(1, max(ranks, 2)))
        victim = self._chance.choice((_TORCHRUN, "0", follower))
        self.jobs.append(Job(arguments, log, self._run_dir, ranks, victim if victim != str(ranks) else "0"))
        return self.jobs[-1]

    @property
    def kills(self) -> list[Kill]:
        return [job.killed for job in self.jobs if job.killed]


@dataclass(frozen=True)
class Play:
    """The result of one killed run. weights: the file of its final weights."""

    ending: Ending
    lives: Lives
    kills: Sequence[Kill]
    weights: Path


def run(stage: Stage) -> Proof:
    steps, fixed = _STEPS_PER_CRASH * max(stage.cycles, 1), -(-stage.cycles // _FIXED_SHARE)
    bodies: list[bytes] = []
    plays: list[Play] = []
    for name, numbers, kills in (("calm", _FIXED, 0), ("changing", _RANKS, stage.cycles), ("fixed", _FIXED, fixed)):
        plan = resume.plan_crashes(kills, stage.chance, _ORDER, start=6, end=0.05)
        with resume.filled(stage, name, bodies, steps) as server:
            plays.append(_play(server, numbers, plan, steps, stage.chance))
    calm, changing, same = plays
    wanted = [resume.id_of(body) for body in bodies]
    apart = difference(calm.weights, changing.weights)
    near = replace(changing.ending, weights=calm.ending.weights) if apart <= _TOLERANCE else changing.ending
    faults = [
        *(f"other ranks: {fault}" for fault in resume.compare(calm.ending, near, wanted)),
        *(f"as many ranks: {fault}" for fault in resume.compare(calm.ending, same.ending, wanted)),
        *judge(changing.kills, stage.cycles),
        *judge(same.kills, fixed),
    ]
    kills = [*changing.kills, *same.kills]
    figures = {
        "kills": len(kills),
        "of torchrun": sum(kill.victim == _TORCHRUN and kill.ranks > 0 for kill in kills),
        "while a checkpoint was written": changing.lives.in_checkpoint + same.lives.in_checkpoint,
        "longest end, s": round(max((kill.seconds for kill in kills), default=0), 1),
        "steps": steps, "steps trained again": changing.lives.steps_repeated + same.lives.steps_repeated,
        "batches": len(bodies), "largest difference": f"{apart:.1e}",
    }  # fmt: skip
    return Proof(faults, figures)


def judge(kills: Sequence[Kill], wanted: int) -> list[str]:
    """Lists the faults of the jobs' ends; empty if the test passed."""
    faults = [f"{len(kills)} of {wanted} kills: the others came after the end"] if len(kills) < wanted else []
    for kill in kills:
        what = f"{kill.victim} of {kill.ranks} ranks"
        if kill.seconds > _LONGEST_END:
            faults.append(f"{what} was killed, and others lived on for {kill.seconds:.0f} s")
        if not kill.named:
            faults.append(f"{what} was killed, and the job does not say so")
    return faults


def difference(calm: Path, shaken: Path) -> float:
    """The largest one between two files' weights."""
    first, second = safetensors.torch.load_file(calm), safetensors.torch.load_file(shaken)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def _play(server: Server, numbers: Sequence[int], plan: Sequence[Crash], steps: int, chance: random.Random) -> Play:
    run_dir = server.directory / "run"
    torchrun = Torchrun(run_dir, numbers, chance)

    def starter(arguments: Sequence[str], log: Path) -> Callable[[], Job]:
        return lambda: torchrun.start(arguments, log)

    try:
        lives = crash_and_resume(resume.trainer_of(server, starter, steps, *_OPTIONS), plan)
    finally:
        for job in torchrun.jobs[-1:]:
            job.clear()
    return Play(resume.ending(server), lives, torchrun.kills, run_dir / "model" / "model.safetensors")
