"""The vLLM server of a worker is killed (SIGKILL) at any moment, half of the time between pause and resume.

Then every problem has arrived once, and every batch's log-probs are those of the version that it names. At last a
version is published whose file is cut in half.
"""

import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from policy_trainer.rollout.sampling.vllm_client import Unavailable, ask
from policy_trainer.weights.published.publication import weights_versions
from shared import wire
from shared.atomic_files import write_json
from shared.batch import Batch
from shared.logprobs import PlainForward
from shared.models import load_model
from tests.chaos.stage import Proof, Stage, broken
from tests.harness.actors import Actor, Launcher
from tests.harness.ports import free_port
from tests.harness.processes import PATIENCE, until
from tests.harness.runs import steps_of
from tests.harness.server import Server

BAR = "engine killed: each problem arrives once, sampled with the weights that its batch names; a cut file is reported"

_RUN = "engine"
_OPTIONS = (
    "--run", _RUN, "--rollout", "external", "--max-steps", "1000000", "--threads", "1", "--sampler", "vllm-server",
    "--sampling.num-generations", "2", "--sampling.prompts-per-round", "2", "--groups-per-step", "2",
    "--sampling.max-completion-length", "8", "--evaluation.problems", "2", "--evaluation.eval-steps", "0",
    "--no-loss.drop-zero-variance", "--optimizer.learning-rate", "1e-3", "--loss.old-logps", "sampler",
)  # fmt: skip
_INTERRUPTED, _REFUSED = 130, 2
# A worker says after 3 seconds what it waits for.
_LONG_OUTAGE = 5.0
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Arrived:
    """A batch. version: its name. difference: the largest one of its log-probs and those of the version's weights."""

    index: int
    version: str
    difference: float


@dataclass(frozen=True)
class Ending:
    """cut: the version whose file was cut. status: exit status of the worker that tried to load it. log: its output."""

    cut: str
    status: int
    log: str


def judge(arrived: Sequence[Arrived], ending: Ending) -> list[str]:
    """The faults; empty if the test passed."""
    counts = Counter(batch.index for batch in arrived)
    missing = set(range(max(counts, default=0) + 1)) - set(counts)
    wrong = [batch.index for batch in arrived if not batch.difference <= _TOLERANCE]
    return broken({
        f"problems arrived more than once: {[index for index, count in counts.items() if count > 1]}":
            max(counts.values(), default=0) > 1,
        f"problems did not arrive: {sorted(missing)}": missing,
        f"problems were sampled with other weights than their batches name: {wrong}": wrong,
        "a version whose file is cut was sampled from": any(batch.version == ending.cut for batch in arrived),
        f"the worker ended with status {ending.status} at a file that is cut": ending.status != _REFUSED,
        "the worker did not report that the file is cut": "cannot load the weights" not in ending.log,
        "the worker did not report what it waits for": "the vLLM server at" not in ending.log,
    })  # fmt: skip


class Play:
    """Engine, trainer and worker."""

    def __init__(self, launcher: Launcher, stage: Stage, server: Server) -> None:
        directory, model, port = stage.directory, str(stage.model), free_port()
        self.run_dir, self.archive = directory / "run", directory / "archive"
        self._calls = directory / "calls"
        self._calls.touch()
        self._url = f"http://127.0.0.1:{port}"
        self.in_reload = 0
        engine = (model, str(port), str(self._calls))
        train = ("train", "--model", model, "--server", server.url, "--run-dir", str(self.run_dir))
        rollout = ("rollout", "--config", str(self.run_dir / "config.toml"))
        recorded = "tests.chaos.recorded"
        self._engine = launcher.actor("tests.chaos.fake_engine", engine, directory / "engine.log")
        self._trainer = launcher.actor(
            recorded, (str(self.archive), *train, "--vllm-url", self._url, *_OPTIONS), directory / "trainer.log"
        )
        self.worker = launcher.actor(recorded, (str(self.archive), *rollout), directory / "worker.log")
        self._trained: list[Actor] = [self._trainer]
        self.start_engine()
        self._trainer.start()
        self._until((self.run_dir / "config.toml").exists, "the configuration")
        self._trained.append(self.worker.start())

    def start_engine(self) -> None:
        self._engine.start()
        until(self._answers, "the engine", seconds=PATIENCE)

    def kill_engine(self, *, in_reload: bool, seconds: float, outage: float) -> None:
        """`seconds` after a pause has begun, or from now."""
        if in_reload:
            before = self._pauses()
            self._until(lambda: self._pauses() > before, "a reload")
        time.sleep(seconds)
        self._engine.kill()
        calls = self._calls.read_text()
        self.in_reload += calls.rfind("/pause") > calls.rfind("/resume")
        time.sleep(outage)
        self.start_engine()

    def until_progress(self) -> None:
        before = len(steps_of(self.run_dir))
        # Groups of three steps may have been waiting for training when the engine was killed.
        self._until(lambda: len(steps_of(self.run_dir)) > before + 4, "steps")

    def end_training(self) -> None:
        """Then waits until the worker has delivered all that there is room for."""
        self._trainer.end(signal.SIGINT, _INTERRUPTED)
        before = self.worker.output().count("to train on")
        until(lambda: self.worker.output().count("to train on") > before, "the worker to wait", seconds=PATIENCE)
        until(lambda: not list(self.run_dir.glob("workers/*/[0-9]*.safetensors")), "the last batches")

    def cut(self) -> Ending:
        """Publishes a version whose file is cut in half."""
        latest = self.run_dir / "weights" / "latest.json"
        fields = json.loads(latest.read_text())
        directory = weights_versions(self.run_dir / "weights").path(fields["epoch"], fields["version"] + 1)
        shutil.copytree(directory.with_name(fields["directory"]), directory)
        file = directory / "model.safetensors"
        os.truncate(file, file.stat().st_size // 2)
        write_json(latest, {**fields, "version": fields["version"] + 1, "directory": directory.name})
        return Ending(directory.name, self.worker.wait(), self.worker.output())

    def _until(self, condition: Callable[[], object], what: str) -> None:
        """Fails if a process has ended."""

        def check() -> object:
            for actor in self._trained:
                actor.check()
            return condition()

        until(check, what, seconds=PATIENCE)

    def _pauses(self) -> int:
        return self._calls.read_text().count("/pause")

    def _answers(self) -> bool:
        self._engine.check()
        try:
            return bool(ask(self._url, lambda client: client.get("/v1/models")))
        except Unavailable:
            return False


def run(stage: Stage) -> Proof:
    """As many kills as there are cycles."""
    chance = stage.chance
    with stage.serving() as server, Launcher() as launcher:
        play = Play(launcher, stage, server)
        play.until_progress()
        for cycle in range(stage.cycles):
            in_reload = cycle % 2 == 0
            play.kill_engine(
                in_reload=in_reload, seconds=chance.uniform(0, 0.25 if in_reload else 1.0),
                outage=0.0 if cycle else _LONG_OUTAGE,
            )  # fmt: skip
            play.until_progress()
        play.end_training()
        ending = play.cut()
        known = {batch["id"] for batch in server.batches(run=_RUN)}
    batches = read_batches(play.archive / "batches")
    arrived = compare(batches, play.archive / "versions")
    faults = judge(arrived, ending)
    faults += broken({
        "acknowledged batches are not on the server": {batch.id for batch in batches} - known,
        "no kill came in the middle of a reload": not play.in_reload,
    })  # fmt: skip
    figures = {
        "kills": stage.cycles, "in the middle of a reload": play.in_reload, "batches": len(arrived),
        "largest difference": f"{max((batch.difference for batch in arrived), default=0):.1e}",
    }  # fmt: skip
    return Proof(faults, figures)


def read_batches(directory: Path) -> list[Batch]:
    decoded = [wire.decode(file.read_bytes()) for file in directory.glob("*.safetensors")]
    return [batch for batch in decoded if batch.ref_logps is None]


def compare(batches: Sequence[Batch], versions: Path) -> list[Arrived]:
    """Compares each batch with the weights that it names."""
    arrived = []
    for numbers in sorted({(batch.epoch, batch.policy_version) for batch in batches}):
        of_version = [batch for batch in batches if (batch.epoch, batch.policy_version) == numbers]
        version = weights_versions(versions).path(*numbers)
        name = version.name
        if not version.exists():
            arrived += [Arrived(batch.index or 0, name, float("inf")) for batch in of_version]
            continue
        forward = PlainForward(load_model(str(version), revision=None, device="cpu", dtype="float32"))
        for batch in of_version:
            assert batch.sampler_logps is not None
            with torch.inference_mode():
                exact = forward([batch.group], [batch.temperature]).numpy()
            arrived.append(Arrived(batch.index or 0, name, float(np.abs(exact - batch.sampler_logps).max())))
    return arrived
