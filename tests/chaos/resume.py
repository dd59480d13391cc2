"""A trainer killed and resumed ends with the very weights of one that was left in peace.

Both train on the same queue, filled beforehand, on one thread of the CPU, so that any difference is a fault: a batch
lost, trained twice, or trained in another order, or a checkpoint that does not hold all of the state.
"""

import hashlib
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
import safetensors

from policy_trainer.checkpoint import Checkpoints, read_state
from policy_trainer.client import RefServerClient
from policy_trainer.metrics import read_metrics
from shared import wire
from tests.chaos.batches import random_batch, with_sampler_logps
from tests.chaos.launch import Launched, Launcher
from tests.chaos.proof import Proof, store_options
from tests.chaos.serving import serving, tiny_model
from tests.integration.processes import Server, until

BAR = "the multiset of trained ids and the final weights equal those of an uninterrupted run, bit for bit"

_RUN = "resumed"
_GROUPS_PER_STEP = 2
_STEPS_PER_CRASH = 6
_OPTIONS = (
    "--run", _RUN, "--rollout", "external", "--threads", "1", "--groups-per-step", str(_GROUPS_PER_STEP),
    "--checkpoint.every", "2", "--optimizer.lr", "1e-3", "--optimizer.warmup-steps", "5",
    "--sampling.max-new-tokens", "8", "--evaluation.every", "0", "--evaluation.problems", "4",
)  # fmt: skip
_SERVER_OPTIONS = (
    # Each batch in a forward of its own: what is packed together moves the last bits of the log-probs.
    "--scoring-tokens", "1",
    # Crashes may hit the same two steps again and again, which must not look like a batch that kills its trainer.
    "--queue.max-deliveries", "1000",
)  # fmt: skip


@dataclass(frozen=True)
class Crash:
    """SIGKILL, `seconds` after a life of the trainer has come so far.

    start: it was started. step: it has recorded `steps` steps. checkpoint: it has then begun to write one. end: the
    checkpoint of the last step is whole, its batches most likely not acked yet.
    """

    at: Literal["start", "step", "checkpoint", "end"]
    steps: int
    seconds: float


@dataclass(frozen=True)
class Ending:
    """What a finished run left. trained: ids in order. weights: a digest by tensor. states: of all batches.

    ledger: ids that the newest checkpoint still wants to be acked, and that the server has not as done.
    """

    trained: Sequence[str]
    weights: Mapping[str, str]
    states: Mapping[str, int]
    ledger: Sequence[str] = ()


@dataclass
class Lives:
    """How the lives of the killed trainer ended."""

    crashes: int = 0
    in_checkpoint: int = 0
    steps_repeated: int = 0


def run(cycles: int, backend: str, directory: Path, seed: int) -> Proof:
    chance = random.Random(seed)
    steps = _STEPS_PER_CRASH * max(cycles, 1)
    model = tiny_model(directory)
    bodies: list[bytes] = []
    with Launcher() as launcher:
        with store_options(backend) as store, serving(model, directory / "calm", *store, *_SERVER_OPTIONS) as server:
            bodies += _make_bodies(server, chance, steps * _GROUPS_PER_STEP)
            _fill(server, bodies)
            began = time.monotonic()
            status = _Trainer(launcher, server, steps).start().wait(600)
            calm_seconds = time.monotonic() - began
            assert status == 0, (server.directory / "trainer.log").read_text()
            calm = _ending(server)
        with store_options(backend) as store, serving(model, directory / "shaken", *store, *_SERVER_OPTIONS) as server:
            _fill(server, bodies)
            lives = _crash(_Trainer(launcher, server, steps), plan_crashes(cycles, chance))
            shaken = _ending(server)
    faults = compare(calm, shaken, wanted=[_id_of(body) for body in bodies])
    if lives.crashes < cycles:
        faults.append(f"only {lives.crashes} of {cycles} crashes: the others came after the end")
    return Proof(
        "trainer killed and resumed", backend, BAR, not faults,
        {
            "crashes": lives.crashes, "crashes while a checkpoint was written": lives.in_checkpoint, "steps": steps,
            "steps trained again": lives.steps_repeated, "batches": len(bodies),
            "tensors that differ": sum(calm.weights[name] != shaken.weights.get(name) for name in calm.weights),
            "seconds uninterrupted": round(calm_seconds, 1), "faults": "; ".join(faults) or "none",
        },
    )  # fmt: skip


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


def compare(calm: Ending, shaken: Ending, wanted: Sequence[str]) -> list[str]:
    """What is wrong with a run that was killed, beside one that was not; nothing is the verdict that it passed.

    wanted: the ids of all batches that were there to be trained.
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


class _Trainer:
    """`policy-trainer train` on a server's batches, life after life."""

    def __init__(self, launcher: Launcher, server: Server, steps: int) -> None:
        self._launcher = launcher
        self._server = server
        self.steps = steps
        self.run_dir = server.directory / "run"

    def start(self) -> Launched:
        arguments = [
            "train", "--model", str(self._server.model), "--server", self._server.url, "--run-dir", str(self.run_dir),
            "--steps", str(self.steps), "--resume", *_OPTIONS,
        ]  # fmt: skip
        return self._launcher.start("policy_trainer.__main__", arguments, self._server.directory / "trainer.log")

    def records(self) -> list[tuple[int, int]]:
        """Epoch and step of every step in metrics.jsonl."""
        path = self.run_dir / "metrics.jsonl"
        records = read_metrics(path) if path.exists() else []
        return [(record["epoch"], record["step"]) for record in records if record["kind"] == "step"]

    def half_written(self) -> set[tuple[str, int]]:
        """Checkpoints that are not whole, each with the time of its last change."""
        found = (self.run_dir / "checkpoints").glob(".tmp-*")
        with suppress(FileNotFoundError):  # it has just become whole
            return {(path.name, path.stat().st_mtime_ns) for path in found}
        return set()

    def saved_steps(self) -> int:
        """The step that the next life begins at."""
        newest = Checkpoints(self.run_dir / "checkpoints", keep=1).newest()
        return read_state(newest).step if newest else 0


class _Life:
    """One life of a trainer, which has a later epoch than the one before."""

    def __init__(self, trainer: _Trainer) -> None:
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


def _crash(trainer: _Trainer, plan: Sequence[Crash]) -> Lives:
    lives = Lives()
    for crash in plan:
        life = _Life(trainer)
        while life.process.running and not life.has_come_to(crash):
            time.sleep(0.001)
        time.sleep(crash.seconds)
        lives.crashes += life.process.kill() == -signal.SIGKILL
        lives.in_checkpoint += life.writes_checkpoint
        lives.steps_repeated += len(trainer.records()) - trainer.saved_steps()
    status = trainer.start().wait(600)
    assert status == 0, (trainer.run_dir.parent / "trainer.log").read_text()
    return lives


def _make_bodies(server: Server, chance: random.Random, count: int) -> list[bytes]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        return [wire.encode(with_sampler_logps(random_batch(chance, _RUN), client)) for _ in range(count)]


def _fill(server: Server, bodies: Sequence[bytes]) -> None:
    """Uploads in order, and waits until all are scored, so that both trainers find the same queue."""
    client = RefServerClient(server.url, on_wait=lambda reason, seconds: None)
    for body in bodies:
        client.upload(body)
    client.close()
    until(lambda: _states(server) == {"ready": len(bodies)}, "all batches to be scored", server)


def _states(server: Server) -> dict[str, int]:
    return {state: depth["batches"] for state, depth in server.get("/v1/queue")["runs"].get(_RUN, {}).items()}


def _ending(server: Server) -> Ending:
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
    """SHA-256 of every tensor's bytes, and of its dtype and shape."""
    return {
        name: hashlib.sha256(repr((part["dtype"], part["shape"])).encode() + bytes(part["data"])).hexdigest()
        for name, part in safetensors.deserialize(path.read_bytes())
    }


def _id_of(body: bytes) -> str:
    batch = wire.decode(body)
    assert not isinstance(batch, wire.ScoredBatch)
    return batch.id
