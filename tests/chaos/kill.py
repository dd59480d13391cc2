"""SIGKILL for server, trainer and worker at any moment of a training run; then every batch must be accounted for.

The moments are random times, moments of the protocol (a request was sent, an answer has just come), and those around a
checkpoint: while it is written, and when it is complete and its batches are not acked yet. Most kills wait for progress
since the last one; every third does not.
"""

import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import apsw

from policy_trainer.reporting.metrics import read_metrics
from shared.api import LeaseBody, State
from shared.client import RefServerClient
from tests.chaos.history import Event, History, check_kills, record_ending
from tests.chaos.processes import Cast, Ended, Launcher, tiny_model
from tests.chaos.proof import Proof, store_options
from tests.chaos.proxy import Faults, Proxy
from tests.ports import free_port

BAR = "kill -9: 0 acknowledged uploads lost, 0 effects doubled, store intact, ready again in under 2 s"

_TARGETS = ("server", "trainer", "worker")
_MOMENTS = tuple((kind, verb) for kind in ("request", "answer") for verb in ("upload", "lease", "extend", "ack"))
_LONGEST_WAIT = 1.5
# After such a moment: its effects are over soon.
_SHORT_WAIT = 0.05
_PATIENCE = 60.0
_INTERRUPTED = 130


def run(cycles: int, backend: str, directory: Path, seed: int) -> Proof:
    model, port = tiny_model(directory), free_port()
    with (
        History(directory / "history.jsonl") as history,
        store_options(backend) as store,
        Proxy(port, history, Faults(0, seed)) as proxy,
        Launcher() as launcher,
    ):
        cast = Cast(launcher, model, directory, port, proxy.url, store)
        try:
            _play(cast, history, cycles, random.Random(seed))
        except Ended as error:  # the rest of the history still says something
            history.record("ended", why=str(error))
        return check_kills(history.events(), backend, BAR)


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
        cast.actors[name].end(signal.SIGINT, status=_INTERRUPTED)
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
    actor.kill()
    history.record("kill", target=target)
    if target != "server":
        return actor.start()
    _record_integrity(cast, history)
    actor.start()
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


def _unsettled(client: RefServerClient) -> int:
    states = client.queue().states
    return sum(states[state].batches for state in (State.QUEUED, State.SCORING, State.READY, State.LEASED))


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
