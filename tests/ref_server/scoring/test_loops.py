"""Several replicas of the reference on one queue: their work, their weights, their failures."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from policy_trainer.cli.demo.base_model import make_model, make_tokenizer
from ref_server.cli.serve import open_queue
from ref_server.config import ServeConfig
from ref_server.queue.queue import Queue
from ref_server.scoring import frozen_model
from ref_server.scoring.loops import ScoringLoops
from ref_server.scoring.reference import DeviceLost, NotReady, Scores
from ref_server.service.service import Service
from shared.api import State
from shared.batch import TokenGroup
from shared.logprobs import choose_forward
from shared.models import save_model
from tests.ref_server.calls import Rollout, Serve, admit
from tests.ref_server.scoring.queued import Observed, lease_scored, put, ref_logps, settled
from tests.rounding import rounding

PATIENCE = 60
Start = Callable[..., AbstractContextManager[httpx.Client]]


@pytest.fixture
def serve_devices(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> Start:
    """A server as the command makes it, with a forward for each batch, and `before` called before each."""

    def serve_on(
        *devices: str, before: Callable[[], object] = lambda: None, **settings: Any
    ) -> AbstractContextManager[httpx.Client]:
        monkeypatch.setattr(
            "ref_server.scoring.frozen_model.choose_forward", lambda model: Observed(model, lambda groups: before())
        )
        data_dir = tmp_path_factory.mktemp("data")
        config = ServeConfig(
            model=str(model_dir), data_dir=data_dir, devices=list(devices), scoring_tokens=1, threads=1, **settings
        )
        return serve(Service(frozen_model.load(config), open_queue(config), config))

    return serve_on


def test_two_replicas_score_as_one_does_bit_for_bit(serve_devices: Start, rollout: Rollout) -> None:
    batches = [rollout(prompt=n, lengths=(3, n, 9)) for n in range(1, 13)]
    scores: list[dict[str, bytes]] = []
    for devices in (["cpu"], ["cpu", "cpu"]):
        with serve_devices(*devices) as http:
            admit(http, *batches)
            leased = [lease_scored(http) for _ in batches]
            assert http.get("/v1/model").json()["device"] == ", ".join(devices)
            assert http.get("/readyz").status_code == 200
        scores.append({each.id: ref_logps(each).tobytes() for each in leased})
    assert scores[0] == scores[1]
    assert scores[0].keys() == {batch.id for batch in batches}


def test_while_replicas_differ(serve_devices: Start, rollout: Rollout, tmp_path: Path) -> None:
    other = make_model(1).eval()
    save_model(other, make_tokenizer(), tmp_path / "next")
    began, go_on = threading.Event(), threading.Event()
    held: list[int] = []

    def hold_the_first() -> None:
        if not held:
            held.append(threading.get_ident())
            began.set()
            assert go_on.wait(PATIENCE)

    first, second = rollout(), rollout()
    with serve_devices("cpu", "cpu", before=hold_the_first, snapshot_root=tmp_path) as http:
        admit(http, first)
        assert began.wait(PATIENCE)
        answers: list[httpx.Response] = []
        body = {"snapshot": "next", "version": 1}
        replacing = threading.Thread(target=lambda: answers.append(http.put("/v1/reference", json=body)))
        replacing.start()
        direct = {"prompt_ids": [1], "completions": [[2]]}
        while http.post("/v1/logprobs", json=direct).json()["reference_version"] == 0:
            time.sleep(0.01)
        admit(http, second)
        scored = lease_scored(http)
        assert (scored.id, scored.reference_version) == (second.id, "1")
        assert not answers, "a replica still scores with the old weights"
        assert http.put("/v1/reference", json=body | {"version": 2}).json()["error"]["code"] == "busy"
        go_on.set()
        replacing.join(PATIENCE)
        assert [answer.status_code for answer in answers] == [200]
        late = lease_scored(http)
    assert (late.id, late.reference_version) == (first.id, "0")
    for got, model in ((late, make_model(0).eval()), (scored, other)):
        expected = choose_forward(model)([got.group], [1.0]).detach().numpy()
        np.testing.assert_allclose(ref_logps(got), expected, atol=rounding(16))


class Fake:
    """A replica that calls `before`, and whose log-probs are zeros."""

    def __init__(self, device: str, before: Callable[[], object] = lambda: None, version: int = 0) -> None:
        self.device = device
        self.version = version
        self._before = before

    def score(self, groups: Sequence[TokenGroup], temperatures: Sequence[float], *, likeliest: bool = False) -> Scores:
        self._before()
        return Scores([np.zeros(len(group.completion_ids), np.float32) for group in groups], self.version)


@pytest.fixture
def loops_of(queue: Queue) -> Iterator[Callable[..., ScoringLoops]]:
    """Starts loops of one batch a forward, and ends them before the queue is closed."""
    started: list[ScoringLoops] = []

    def start(*replicas: Fake) -> ScoringLoops:
        started.append(ScoringLoops(replicas, queue, tokens_per_forward=1, on_ready=lambda: None))
        started[-1].start()
        return started[-1]

    yield start
    for loops in started:
        loops.stop()
        loops.join()


def test_an_idle_replica_takes_direct_requests(loops_of: Any, queue: Queue, rollout: Rollout) -> None:
    began, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        if not began.is_set():
            began.set()
            assert go_on.wait(PATIENCE)

    loops = loops_of(Fake("a", hold), Fake("b", hold))
    put(queue, rollout())
    loops.ring()
    assert began.wait(PATIENCE)
    for _ in range(5):
        loops.submit([rollout().group], 1.0).result(PATIENCE)
    go_on.set()


def test_when_one_replica_is_lost_the_others_finish(loops_of: Any, queue: Queue, rollout: Rollout) -> None:
    both, lost = threading.Barrier(2, timeout=PATIENCE), threading.Event()

    def lose() -> None:
        both.wait()
        raise DeviceLost("gone")

    def outlive() -> None:
        both.wait()
        assert lost.wait(PATIENCE)

    loops = loops_of(Fake("a", lose), Fake("b", outlive))
    batches = [rollout(), rollout()]
    put(queue, *batches)
    loops.ring()
    while not loops.failed:
        time.sleep(0.01)
    assert loops.alive
    loops.stop()
    lost.set()
    loops.join()
    assert not loops.alive and loops.failed
    states = sorted(str(info.state) for batch in batches if (info := queue.get(batch.id)))
    assert states == ["ready", "scoring"]
    with pytest.raises(NotReady):
        loops.submit([rollout().group], 1.0)


def test_interrupted_batches_come_first_one_by_one(tmp_path: Path, rollout: Rollout) -> None:
    """So only the batch that ends the next server, too, counts as interrupted again."""
    config = ServeConfig(no_model=True, data_dir=tmp_path)
    suspects, other = [rollout(), rollout()], rollout()
    with closing(open_queue(config)) as before:
        put(before, *suspects)
        assert len(before.claim(1000)) == 2
    seen: list[list[State]] = []
    with closing(open_queue(config)) as queue:

        def look() -> None:
            time.sleep(0.05)  # the other loop could claim meanwhile
            infos = [queue.get(batch.id) for batch in (*suspects, other)]
            seen.append([info.state for info in infos if info])

        put(queue, other)
        loops = ScoringLoops([Fake("a", look), Fake("b", look)], queue, tokens_per_forward=1, on_ready=lambda: None)
        loops.start()
        for batch in (*suspects, other):
            settled(queue, batch)
        loops.stop()
        loops.join()
    assert seen[:2] == [
        [State.SCORING, State.QUEUED, State.QUEUED],
        [State.READY, State.SCORING, State.QUEUED],
    ]
