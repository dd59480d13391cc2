"""SIGKILL for server, trainer and worker at any moment of a training run; then every batch must be accounted for.

Either the problems are the demo's, or most of them have pictures, and the model is a vision-language model.

The moments are random times, moments of the protocol (a request was sent, an answer has just come), and those around a
checkpoint: while it is written, and when it is complete and its batches are not acked yet. Most kills wait for progress
since the last one; every third does not.
"""

import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import apsw

from policy_trainer.data.pictures import encode
from policy_trainer.reporting.metrics import read_metrics
from shared.api import LeaseBody
from shared.client import RefServerClient
from tests.chaos.stage import Proof, Stage, broken
from tests.chaos.verdicts import SETTLED, check_kills, record_ending
from tests.harness.actors import Ended, Launcher
from tests.harness.history import Event, History
from tests.harness.ports import free_port
from tests.harness.proxy import Proxy
from tests.policy_trainer.data.tasks.formats import write
from tests.policy_trainer.vision_models import picture, save_vision_model

BAR = "kill -9: 0 acknowledged uploads lost, 0 effects doubled, store intact, ready again in under 2 s"

_TARGETS = ("server", "trainer", "worker")
_MOMENTS = tuple((kind, verb) for kind in ("request", "answer") for verb in ("upload", "lease", "extend", "ack"))
_LONGEST_WAIT = 1.5
# After such a moment: its effects are over soon.
_SHORT_WAIT = 0.05
_PATIENCE = 60.0
_INTERRUPTED = 130


# Small, so that every event is frequent: a step in a fraction of a second, a checkpoint every few.
_TRAINING = (
    "--rollout", "external", "--resume", "--max-steps", "1000000", "--threads", "1", "--lease-seconds", "10",
    "--sampling.num-generations", "2", "--sampling.prompts-per-round", "2", "--groups-per-step", "2",
    "--sampling.max-completion-length", "8", "--evaluation.problems", "2", "--evaluation.eval-steps", "0",
    "--no-loss.drop-zero-variance", "--optimizer.learning-rate", "1e-5", "--checkpoint.save-steps", "3",
    "--max-lag", "4",
)  # fmt: skip
# Problems of the task with pictures.
_PROBLEMS = 50


class Cast:
    """Server, trainer and worker."""

    def __init__(
        self, launcher: Launcher, stage: Stage, port: int, url: str, store: tuple[str, ...], task: tuple[str, ...]
    ) -> None:
        """port: the server's. url: where trainer and worker reach it. store, task: options of server and trainer."""
        directory, model = stage.directory, str(stage.model)
        self.data = directory / "server"
        self.run_dir = directory / "run"
        self._config = self.run_dir / "config.toml"
        self.server_url = f"http://127.0.0.1:{port}"
        serve = ("serve", "--model", model, "--port", str(port), "--threads", "1", "--data-dir", str(self.data))
        train = ("train", "--model", model, "--server", url, "--run-dir", str(self.run_dir), *_TRAINING, *task)
        self.actors = {
            "server": launcher.actor("ref_server.__main__", (*serve, *store), directory / "server.log"),
            "trainer": launcher.actor("policy_trainer.__main__", train, directory / "trainer.log"),
            "worker": launcher.actor(
                "policy_trainer.__main__", ("rollout", "--config", str(self._config)), directory / "worker.log"
            ),
        }

    def start(self) -> None:
        self.actors["server"].start()
        self.until_ready()
        self.actors["trainer"].start()
        while not self._config.exists():
            self.actors["trainer"].check()
            time.sleep(0.05)
        self.actors["worker"].start()

    def check(self) -> None:
        for actor in self.actors.values():
            actor.check()

    def writes_checkpoint(self) -> bool:
        return any((self.run_dir / "checkpoints").glob(".tmp-*"))

    def until_ready(self) -> tuple[float, float]:
        """Seconds from the server's start until its store was open, by its log, and until it was ready, by /readyz."""
        server, store = self.actors["server"], 0.0
        with RefServerClient(self.server_url) as client:
            while (elapsed := time.monotonic() - server.started) < _PATIENCE:
                server.check()
                store = store or (elapsed if re.search(r"queue open\b", server.output()) else 0.0)
                if client.not_ready_reason() is None:
                    ready = time.monotonic() - server.started
                    return store or ready, ready
                time.sleep(0.01)
        raise Ended(f"the server is not ready after {_PATIENCE:.0f} s:\n{server.output()}")


def run(stage: Stage) -> Proof:
    return check_kills(killed(stage))


def run_pictures(stage: Stage) -> Proof:
    save_vision_model("qwen2_vl", stage.directory / "model")
    path = _write_problems(stage.directory / "problems", stage.chance)
    events = killed(stage, "--task", "jsonl", "--data.path", str(path), "--data.system-prompt", "")
    proof = check_kills(events)
    sent = {id for event in events if event.get("pictures") for id in event["ids"]}
    trained = {id for event in events if event["kind"] == "step" for id in event["batch_ids"]}
    faults = [*proof.faults, *broken({"no effect was one of pictures": not sent & trained})]
    return Proof(faults, {**proof.figures, "effects of pictures": len(sent & trained)})


def _write_problems(directory: Path, chance: random.Random) -> Path:
    """A JSONL file of problems with none to two pictures of any size, and its PNG files."""
    directory.mkdir()
    rows = []
    for number in range(_PROBLEMS):
        names = [f"{number}-{place}.png" for place in range(chance.choice((0, 1, 1, 2)))]
        for name in names:
            (directory / name).write_bytes(encode(picture(chance.randint(28, 112), chance.randint(28, 112))))
        rows.append({"prompt": f"{number}?", "answer": "1", "images": names})
    return write(directory / "problems.jsonl", *rows)


def killed(stage: Stage, *task: str) -> list[Event]:
    """The history of such a run. task: options of the trainer."""
    port = free_port()
    with (
        History(stage.directory / "history.jsonl") as history,
        stage.store() as store,
        Proxy(port, history, 0, stage.seed) as proxy,
        Launcher() as launcher,
    ):
        try:
            cast = Cast(launcher, stage, port, proxy.url, store, task)
            _play(cast, history, stage.cycles, stage.chance)
        except Ended as error:  # the rest of the history still says something
            history.record("ended", why=str(error))
        return history.events()


def _play(cast: Cast, history: History, cycles: int, chance: random.Random) -> None:
    cast.start()
    _until_progress(cast, history, history.mark())
    for cycle, target in zip(range(cycles), _targets(chance), strict=False):
        _wait_for_moment(cast, history, chance)
        mark = history.mark()
        _kill_and_start(cast, history, target)
        if cycle % 3 != 2:
            _until_progress(cast, history, mark)
    _until_progress(cast, history, history.mark())
    for name in ("trainer", "worker"):
        cast.actors[name].end(signal.SIGINT, _INTERRUPTED)
    _drain(cast, history)
    _record_lineage(cast, history)
    record_ending(history, cast.server_url)


def _targets(chance: random.Random) -> Iterator[str]:
    """Endless; each target equally often, in random order."""
    while True:
        yield from chance.sample(_TARGETS, len(_TARGETS))


def _wait_for_moment(cast: Cast, history: History, chance: random.Random) -> None:
    kind = chance.choice(("time", "protocol", "checkpoint begins", "checkpoint is there"))
    if kind == "time":
        return time.sleep(chance.uniform(0, _LONGEST_WAIT))
    if kind == "protocol":
        moment = chance.choice(_MOMENTS)
        history.wait_for(
            lambda event: (event["kind"], event.get("verb")) == moment, since=history.mark(), seconds=_LONGEST_WAIT
        )
    else:
        _wait_until(cast.writes_checkpoint)
        if kind == "checkpoint is there":
            _wait_until(lambda: not cast.writes_checkpoint())
    time.sleep(chance.choice((0.0, chance.uniform(0, _SHORT_WAIT))))


def _wait_until(condition: Callable[[], bool]) -> None:
    """Waits at most _LONGEST_WAIT; the test continues if the condition never holds."""
    deadline = time.monotonic() + _LONGEST_WAIT
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.0005)


def _kill_and_start(cast: Cast, history: History, target: str) -> None:
    actor = cast.actors[target]
    actor.check()
    actor.kill()
    history.record("kill", target=target)
    if target == "server":
        _record_integrity(cast, history)
    actor.start()
    if target == "server":
        store, ready = cast.until_ready()
        history.record("restart", store_seconds=round(store, 3), ready_seconds=round(ready, 3))


def _until_progress(cast: Cast, history: History, mark: int) -> None:
    """Waits until a checkpoint has been acked, which needs all three processes."""
    deadline = time.monotonic() + _PATIENCE
    while not history.wait_for(_is_progress, since=mark, seconds=0.5):
        cast.check()
        if time.monotonic() > deadline:
            outputs = "\n".join(f"{name}: {actor.output()[-500:]}" for name, actor in cast.actors.items())
            raise Ended(f"no checkpoint was acked for {_PATIENCE:.0f} s:\n{outputs}")


def _is_progress(event: Event) -> bool:
    """An ack of several batches: after a resume, acks repeated from the ledger name one batch each."""
    settles = event["kind"] == "answer" and event["verb"] == "ack" and event["status"] == 200
    return settles and len(event["ids"]) > 1 and "ok" in event["outcomes"]


def _drain(cast: Cast, history: History) -> None:
    """Leases and acks what is left, as another trainer would, so that every batch is settled."""
    deadline = time.monotonic() + _PATIENCE
    with RefServerClient(cast.server_url) as client:
        while _unsettled(client):
            if time.monotonic() > deadline:
                raise Ended(f"batches are neither settled nor leased to anybody else after {_PATIENCE:.0f} s")
            leased = client.lease(LeaseBody(consumer="drain", wait_seconds=1))
            if leased:
                client.ack([leased])
                history.record("drained", id=leased.id)


def _unsettled(client: RefServerClient) -> bool:
    """By the list of batches: the counts may be a little older."""
    return any(batch.state not in SETTLED for batch in client.batches())


def _record_lineage(cast: Cast, history: History) -> None:
    """Records the batches of each step, by the run's metrics, which a resumed trainer cuts back to its checkpoint."""
    for record in read_metrics(cast.run_dir / "metrics.jsonl"):
        if record["kind"] == "step":
            history.record("step", step=record["step"], epoch=record["epoch"], batch_ids=record["batch_ids"])


def _record_integrity(cast: Cast, history: History) -> None:
    """Runs SQLite's integrity check on a copy of a killed server's store. PostgreSQL is not killed here."""
    for file in cast.data.glob("*.sqlite"):
        with tempfile.TemporaryDirectory() as directory:
            for part in (file, file.with_name(f"{file.name}-wal")):
                if part.exists():
                    shutil.copy(part, directory)
            with closing(apsw.Connection(str(Path(directory) / file.name))) as store:
                history.record("integrity", verdict=str(store.pragma("integrity_check")))
