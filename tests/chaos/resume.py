"""A trainer that is repeatedly killed at chosen moments and resumed."""

import hashlib
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import safetensors

from policy_trainer.reporting.metrics import read_metrics
from policy_trainer.run_files.checkpoint import Checkpoints, read_state
from policy_trainer.run_files.run_directory import RunDirectory
from shared import wire
from shared.atomic_files import write_json
from shared.batch import Batch
from shared.client import RefServerClient
from tests.chaos.stage import Proof, Stage
from tests.harness.actors import Launcher
from tests.harness.batches import random_batch, seeing_batch, with_sampler_logps
from tests.harness.processes import until
from tests.harness.server import Server
from tests.policy_trainer.vision_models import save_vision_model


class Life(Protocol):
    """A process, or a job of several. kill: by SIGKILL; the exit status is -9 unless it had ended by itself."""

    @property
    def running(self) -> bool: ...
    def kill(self) -> int: ...
    def wait(self, seconds: float) -> int: ...


# Called with the arguments of `policy-trainer` and a log; returns what starts the next life.
Starter = Callable[[Sequence[str], Path], Callable[[], Life]]
MakeBatch = Callable[[random.Random, str], Batch]


_ORDER = ("checkpoint", "step", "checkpoint", "step", "start")


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


def plan_crashes(
    cycles: int, chance: random.Random, order: Sequence[str] = _ORDER, start: float = 1.5, end: float = 0.003
) -> list[Crash]:
    """Most are within a few steps of a start, half of those while a checkpoint is written; the last is at the end.

    start, end: how many seconds after a start and after the last checkpoint, at most.
    """
    kinds = {
        "start": lambda: Crash("start", 0, chance.uniform(0, start)),
        "step": lambda: Crash("step", chance.randint(1, 4), chance.uniform(0, 0.06)),
        "checkpoint": lambda: Crash("checkpoint", chance.randint(1, 3), chance.uniform(0, 0.03)),
    }
    crashes = [kinds[order[i % len(order)]]() for i in range(cycles - 1)]
    return [*crashes, Crash("end", 0, chance.uniform(0, end))][:cycles]


class Trainer:
    """`policy-trainer train` in one run's directory, started several times."""

    def __init__(self, start: Starter, run_dir: Path, steps: int, *options: str) -> None:
        self._log = run_dir.with_suffix(".log")
        arguments = ("train", "--run-dir", str(run_dir), "--max-steps", str(steps), "--resume", *options)
        self.start = start(arguments, self._log)
        self._read: tuple[tuple[int, int], list[tuple[int, int]]] = ((0, 0), [])
        self.run_dir = run_dir
        self.steps = steps

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
        if (now.st_size, now.st_mtime_ns) != self._read[0]:  # called every millisecond
            records = [record for record in read_metrics(path) if record["kind"] == "step"]
            self._read = (now.st_size, now.st_mtime_ns), [(record["epoch"], record["step"]) for record in records]
        return self._read[1]

    def half_written(self) -> set[tuple[str, int]]:
        """Incomplete checkpoints, each with the time of its last change."""
        incomplete = (self.run_dir / "checkpoints").glob(".tmp-*")
        with suppress(FileNotFoundError):  # it has just been completed
            return {(path.name, path.stat().st_mtime_ns) for path in incomplete}
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


BAR = "the multiset of trained ids and the final weights equal those of an uninterrupted run, bit for bit"

_RUN = "resumed"
_LINEAGE = "chaos"
GROUPS_PER_STEP = 2
_STEPS_PER_CRASH = 6
OPTIONS = (
    "--run", _RUN, "--rollout", "external", "--threads", "1", "--groups-per-step", str(GROUPS_PER_STEP),
    "--checkpoint.save-steps", "2", "--optimizer.learning-rate", "1e-3", "--optimizer.warmup-steps", "5",
    "--sampling.max-completion-length", "8", "--evaluation.eval-steps", "0", "--evaluation.problems", "4",
)  # fmt: skip
_SERVER_OPTIONS = (
    # One batch per forward: packing changes the last bits of the log-probs.
    "--scoring-tokens", "1",
    # Crashes may hit the same two steps repeatedly, and their batches must not become dead.
    "--queue.max-deliveries", "1000",
)  # fmt: skip


@dataclass(frozen=True)
class Ending:
    """Result of a finished run. trained: ids in order. weights: a digest by tensor. states: of all batches.

    ledger: ids in the newest checkpoint's ledger that are not done on the server.
    """

    trained: Sequence[str]
    weights: Mapping[str, str]
    states: Mapping[str, int]
    ledger: Sequence[str] = ()


def run_pictures(stage: Stage) -> Proof:
    save_vision_model("qwen2_vl", stage.directory / "model")
    return run(stage, seeing_batch)


def run(stage: Stage, make_batch: MakeBatch = random_batch) -> Proof:
    steps = _STEPS_PER_CRASH * max(stage.cycles, 1)
    bodies: list[bytes] = []
    with Launcher() as launcher:

        def starter(arguments: Sequence[str], log: Path) -> Callable[[], Life]:
            return launcher.actor("policy_trainer.__main__", arguments, log).start

        with filled(stage, "calm", bodies, steps, make_batch) as server:
            trainer_of(server, starter, steps, *OPTIONS).finish()
            calm = ending(server)
        with filled(stage, "shaken", bodies, steps) as server:
            plan = plan_crashes(stage.cycles, stage.chance)
            lives = crash_and_resume(trainer_of(server, starter, steps, *OPTIONS), plan)
            shaken = ending(server)
    faults = compare(calm, shaken, wanted=[id_of(body) for body in bodies])
    if lives.crashes < stage.cycles:
        faults.append(f"only {lives.crashes} of {stage.cycles} crashes: the others came after the end")
    figures = {
        "crashes": lives.crashes, "crashes while a checkpoint was written": lives.in_checkpoint, "steps": steps,
        "steps trained again": lives.steps_repeated, "batches": len(bodies),
    }  # fmt: skip
    return Proof(faults, figures)


@contextmanager
def filled(
    stage: Stage, name: str, bodies: list[bytes], steps: int, make_batch: MakeBatch = random_batch
) -> Iterator[Server]:
    """A server in a directory of this name, with all batches of the steps scored. The first one makes them."""
    with stage.serving_store(*_SERVER_OPTIONS, directory=stage.directory / name) as server:
        with RefServerClient(server.url) as client:
            if not bodies:
                batches = [make_batch(stage.chance, _RUN) for _ in range(steps * GROUPS_PER_STEP)]
                sampled = [with_sampler_logps(batch, client) for batch in batches]
                bodies += [wire.encode(replace(batch, lineage=_LINEAGE)) for batch in sampled]
            for body in bodies:  # in order, so that all trainers find the same queue
                client.upload(body)
        until(lambda: _states(server) == {"ready": len(bodies)}, "all batches to be scored", server)
        yield server


def compare(calm: Ending, shaken: Ending, wanted: Sequence[str]) -> list[str]:
    """Lists the faults of a killed run compared with an uninterrupted one; empty if the test passed.

    wanted: the ids of all batches in the queue.
    """
    faults = []
    for name, ending in (("uninterrupted", calm), ("killed", shaken)):
        if Counter(ending.trained) != Counter(wanted):
            missing, surplus = Counter(wanted) - Counter(ending.trained), Counter(ending.trained) - Counter(wanted)
            faults.append(f"{name}: {missing.total()} ids not trained, {surplus.total()} trained too often")
        if dict(ending.states) != {"done": len(wanted)}:
            faults.append(f"{name}: the server has {dict(ending.states)}, not {len(wanted)} done")
        if ending.ledger:
            faults.append(f"{name}: {len(ending.ledger)} ids of the ledger are not acked")
    if not calm.weights or dict(calm.weights) != dict(shaken.weights):
        faults.append("the weights differ")
    return faults


def trainer_of(server: Server, start: Starter, steps: int, *options: str) -> Trainer:
    """Its directory has the lineage of the batches that are in the queue already."""
    directory = RunDirectory(server.directory / "run")
    directory.root.mkdir()
    write_json(directory.identity, {"lineage": _LINEAGE})
    return Trainer(start, directory.root, steps, "--model", str(server.model), "--server", server.url, *options)


def _states(server: Server) -> dict[str, int]:
    return {state: depth["batches"] for state, depth in server.get("/v1/queue")["runs"].get(_RUN, {}).items()}


def ending(server: Server) -> Ending:
    run_dir = server.directory / "run"
    steps = [record for record in read_metrics(run_dir / "metrics.jsonl") if record["kind"] == "step"]
    newest = Checkpoints(run_dir / "checkpoints", keep=1).newest()
    assert newest is not None
    done = {batch["id"] for batch in server.batches(run=_RUN, state="done")}
    return Ending(
        trained=[id for record in steps for id in record["batch_ids"]],
        weights=_digests(run_dir / "model" / "model.safetensors"),
        states=_states(server),
        ledger=[id for id in read_state(newest).ledger if id not in done],
    )


def _digests(path: Path) -> dict[str, str]:
    """By tensor, SHA-256 of its dtype, shape and bytes."""
    return {
        name: hashlib.sha256(repr((part["dtype"], part["shape"])).encode() + bytes(part["data"])).hexdigest()
        for name, part in safetensors.deserialize(path.read_bytes())
    }


def id_of(body: bytes) -> str:
    batch = wire.decode(body)
    assert batch.ref_logps is None
    return batch.id
