"""A trainer that is killed and resumed ends with exactly the weights of an uninterrupted one.

Both train on the same queue, filled beforehand, on one thread of the CPU, so that any difference is a fault: a batch
lost, trained twice, or trained in another order, or a checkpoint that does not hold all of the state.
"""

import hashlib
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors

from policy_trainer.reporting.metrics import read_metrics
from policy_trainer.run_files.checkpoint import Checkpoints, read_state
from policy_trainer.run_files.run_directory import RunDirectory
from shared import wire
from shared.atomic_files import write_json
from shared.client import RefServerClient
from tests.chaos.batches import random_batch, with_sampler_logps
from tests.chaos.launch import Launcher
from tests.chaos.lives import Starts, Trainer, crash_and_resume, plan_crashes
from tests.chaos.proof import Proof, store_options
from tests.chaos.serving import serving, tiny_model
from tests.integration.processes import Server, until

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
SERVER_OPTIONS = (
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


def run(cycles: int, backend: str, directory: Path, seed: int) -> Proof:
    chance = random.Random(seed)
    steps = _STEPS_PER_CRASH * max(cycles, 1)
    model = tiny_model(directory)
    bodies: list[bytes] = []
    with Launcher() as launcher:
        with store_options(backend) as store, serving(model, directory / "calm", *store, *SERVER_OPTIONS) as server:
            bodies += make_bodies(server, chance, steps * GROUPS_PER_STEP)
            fill(server, bodies)
            began = time.monotonic()
            trainer_of(server, launcher, steps, *OPTIONS).finish()
            calm_seconds = time.monotonic() - began
            calm = ending(server)
        with store_options(backend) as store, serving(model, directory / "shaken", *store, *SERVER_OPTIONS) as server:
            fill(server, bodies)
            lives = crash_and_resume(trainer_of(server, launcher, steps, *OPTIONS), plan_crashes(cycles, chance))
            shaken = ending(server)
    faults = compare(calm, shaken, wanted=[id_of(body) for body in bodies])
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


def trainer_of(server: Server, launcher: Starts, steps: int, *options: str) -> Trainer:
    """Its directory has the lineage of the batches that are in the queue already."""
    directory = RunDirectory(server.directory / "run")
    directory.root.mkdir()
    write_json(directory.identity, {"lineage": _LINEAGE})
    return Trainer(launcher, directory.root, steps, "--model", str(server.model), "--server", server.url, *options)


def make_bodies(server: Server, chance: random.Random, count: int) -> list[bytes]:
    with RefServerClient(server.url) as client:
        batches = [with_sampler_logps(random_batch(chance, _RUN), client) for _ in range(count)]
    return [wire.encode(replace(batch, lineage=_LINEAGE)) for batch in batches]


def fill(server: Server, bodies: Sequence[bytes]) -> None:
    """Uploads in order, and waits until all are scored, so that both trainers find the same queue."""
    with RefServerClient(server.url) as client:
        for body in bodies:
            client.upload(body)
    until(lambda: _states(server) == {"ready": len(bodies)}, "all batches to be scored", server)


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
    assert not isinstance(batch, wire.ScoredBatch)
    return batch.id
