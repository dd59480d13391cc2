"""A worker with a scripted sampler and a scripted server: what it samples, and when it waits."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from policy_trainer.config import RolloutConfig, SamplingConfig
from policy_trainer.data.completion import Completion, Probe
from policy_trainer.rollout.sampling.sampler import WeightsLost
from policy_trainer.rollout.worker import RolloutWorker, RunFinished
from policy_trainer.weights.published.directory import WeightsDirectory
from shared import wire
from shared.api import State
from shared.atomic_files import write_json
from shared.batch import Batch, TokenGroup
from shared.client import RefServerError
from shared.errors import UserError
from tests.policy_trainer.rollout.fakes import Scripted, Server, make_rounds

ROUND = 3
Act = Callable[..., None]


class Enough(Exception):
    """The worker waits, as it should: the test is over."""


class Waits:
    """Ends a worker that waits, once a condition holds."""

    def __init__(self, enough: Callable[[], bool]) -> None:
        self._enough = enough

    def __call__(self, reason: str, seconds: float) -> None:
        if self._enough():
            raise Enough(reason)


class Counted(Scripted):
    """Remembers the weights that it sampled with. A round more than `most` is one too many."""

    most = 99

    weights = b""
    known: Sequence[float] = ()

    def load(self, model: Path) -> None:
        self.weights = (model / "model.safetensors").read_bytes()

    def logps(self, group: TokenGroup) -> np.ndarray:
        assert (group.prompt_ids.tolist(), group.completion_ids.tolist()) == ([5], [6, 7])
        return np.array(self.known, np.float32)

    def answer_all(self, prompts: Any, params: Any, seed: int) -> Any:
        assert len(self.seeds) < self.most, "a round was sampled for which there was no room"
        return super().answer_all(prompts, params, seed)


@pytest.fixture
def sampler(tokenizer: PreTrainedTokenizerFast) -> Counted:
    return Counted(tokenizer, mixed=set(range(100)))


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.open.set()


@pytest.fixture
def work(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, sampler: Counted, server: Server) -> Act:
    def run(enough: Callable[[], bool] = lambda: True, **settings: Any) -> None:
        sampling = SamplingConfig(num_generations=2, prompts_per_round=ROUND, **settings)
        config = RolloutConfig(model="m", run="ours", run_dir=tmp_path, sampling=sampling)
        client: Any = server
        weights, rounds = WeightsDirectory(tmp_path / "weights"), make_rounds(tokenizer, sampler, config)
        RolloutWorker(config, sampler, 8, rounds, client, weights, Waits(enough)).run()

    return run


@pytest.fixture
def publish(tmp_path: Path) -> Act:
    def write(**fields: Any) -> None:
        (tmp_path / "weights").mkdir(exist_ok=True)
        whole = {"run": "ours", "epoch": 1, "version": 2, "next_index": 0, "max_waiting": ROUND, "lineage": "one"}
        version = tmp_path / "weights" / f"0001-{(whole | fields)['version']:08d}"
        version.mkdir(exist_ok=True)
        (version / "model.safetensors").write_bytes(b"weights")
        write_json(tmp_path / "weights" / "latest.json", whole | fields)

    return write


def rollout_of(body: bytes) -> Batch:
    batch = wire.decode(body)
    assert batch.ref_logps is None
    return batch


def test_batches_that_are_not_delivered_yet_count_as_waiting(
    work: Act, publish: Act, server: Server, sampler: Counted
) -> None:
    sampler.most = 1
    publish()
    with pytest.raises(Enough, match="train on 3 groups"):
        work()
    assert not server.bodies


def test_a_batch_names_its_weights(work: Act, publish: Act, server: Server, sampler: Counted) -> None:
    server.open.set()
    publish(next_index=7)
    with pytest.raises(Enough):
        work(lambda: len(server.bodies) == ROUND)
    batches = sorted((rollout_of(body) for body in server.bodies), key=lambda batch: batch.id)
    for batch in batches:
        assert (batch.run, batch.lineage, batch.epoch, batch.policy_version) == ("ours", "one", 1, 2)
    assert [batch.index for batch in batches] == [7, 8, 9]
    assert [batch.rewards.tolist() for batch in batches] == [[1, 0]] * ROUND
    assert sampler.weights == b"weights"


class Worsening(Counted):
    """Right on problem 0 in the first round, after which other weights come, and wrong later."""

    after_first: Callable[[], None]

    def answer_all(self, prompts: Any, params: Any, seed: int) -> Any:
        answers = super().answer_all(prompts, params, seed)
        if len(self.seeds) == 1:
            self.after_first()
        return answers

    def answer(self, number: int) -> Completion:
        return super().answer(-1 if number == 0 and len(self.seeds) > 1 else number)


class TestSeveralVersions:
    @pytest.fixture
    def sampler(self, tokenizer: PreTrainedTokenizerFast) -> Worsening:
        return Worsening(tokenizer, mixed={1, 2})

    def test_a_regrouped_batch_names_the_weights_of_each_completion(
        self, work: Act, publish: Act, server: Server, sampler: Worsening
    ) -> None:
        server.open.set()
        publish(max_waiting=99)
        sampler.after_first = lambda: publish(version=3)
        with pytest.raises(Enough):
            work(lambda: len(server.bodies) >= ROUND, regroup=3)
        batches = {batch.index: batch for batch in map(rollout_of, server.bodies)}
        assert (batches[1].policy_version, batches[1].policy_versions) == (2, None)
        mixed = batches[0]
        assert mixed.policy_version == 2 and mixed.policy_versions is not None
        assert sorted(zip(mixed.policy_versions.tolist(), mixed.rewards.tolist(), strict=True)) == [(2, 1), (3, 0)]


def indexes(server: Server) -> list[int]:
    batches = sorted((rollout_of(body) for body in server.bodies), key=lambda batch: batch.id)
    return [batch.index for batch in batches if batch.index is not None]


class TestGroupsOfAStep:
    """With max_lag = 0 a publication says how many groups its step needs."""

    def test_they_are_sampled_and_no_others(self, work: Act, publish: Act, server: Server, sampler: Counted) -> None:
        server.open.set()
        publish(next_index=8, groups=ROUND + 2, max_waiting=99)
        with pytest.raises(Enough, match="the weights of step 3"):
            work(lambda: len(server.bodies) >= ROUND + 2)
        assert indexes(server) == [8, 9, 10, 11, 12] and len(sampler.seeds) == 2

    def test_others_are_sampled_for_lost_ones_and_the_next_step_begins_where_the_trainer_is(
        self, work: Act, publish: Act, server: Server
    ) -> None:
        server.open.set()
        publish(groups=2)
        steps = iter([{"version": 2, "groups": 3}, {"version": 3, "groups": 2, "next_index": 1}])

        def enough() -> bool:
            if len(server.bodies) in (2, 3) and (fields := next(steps, None)):
                publish(**fields)
            return len(server.bodies) == 5

        with pytest.raises(Enough):
            work(enough)
        assert indexes(server) == [0, 1, 2, 1, 2]

    def test_a_refused_one_is_replaced(self, work: Act, publish: Act, server: Server) -> None:
        server.open.set()
        publish(groups=1)
        upload, bodies = server.upload, list[bytes]()

        def refuse_first(body: bytes) -> Any:
            bodies.append(body)
            if len(bodies) == 1:
                raise RefServerError(422, "a bad batch", code="invalid")
            return upload(body)

        server.upload = refuse_first
        with pytest.raises(Enough):
            work(lambda: len(server.bodies) == 1)
        assert indexes(server) == [1]

    def test_those_that_a_server_has_dropped_are_replaced_after_a_while(
        self, work: Act, publish: Act, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("policy_trainer.rollout.worker._LOST_SECONDS", 0.1)
        server.open.set()
        publish(groups=2)

        def enough() -> bool:
            server.state = State.EXPIRED if len(server.bodies) == 2 else State.QUEUED
            return len(server.bodies) == 6

        with pytest.raises(Enough):
            work(enough)
        assert indexes(server) == [0, 0, 1, 1, 2, 3]


PROBE = Probe([5], [[6, 7]], [-1.0, -2.0])


def test_log_probs_are_compared_with_the_trainers_after_an_update(
    work: Act, publish: Act, server: Server, sampler: Counted
) -> None:
    server.open.set()
    sampler.known = [-1.1, -2.3]
    publish(probe=asdict(PROBE))
    with pytest.raises(Enough):
        work(lambda: len(server.bodies) == ROUND)
    sample = json.loads(rollout_of(server.bodies[0]).sample or "")
    assert sample["probe_logp_difference"] == pytest.approx(0.2)
    assert sample["probe_logp_difference_max"] == pytest.approx(0.3)


@pytest.mark.parametrize(("prompt", "completion"), [([8], [6, 7]), ([5], [6, 8])])
def test_a_probe_beyond_the_vocabulary_is_refused_with_its_version(
    work: Act, publish: Act, prompt: list[int], completion: list[int]
) -> None:
    publish(probe=asdict(Probe(prompt, [completion], [-1.0, -2.0])))
    with pytest.raises(UserError, match=r"^weights: the probe .* version 0001-00000002 .*_ids.*\[0, 8\)"):
        work()


@pytest.mark.parametrize("known", [[-1.0, -6.5], [float("nan"), -2.0]])
def test_a_sampler_with_other_weights_than_the_published_stops(
    work: Act, publish: Act, server: Server, sampler: Counted, known: list[float]
) -> None:
    """An engine may keep a copy of the old weights and say nothing: it would sample from another policy for days."""
    sampler.known = known
    publish(probe=asdict(PROBE))
    with pytest.raises(UserError, match=r"max_logp_difference: after loading version 2 .* differ"):
        work()
    assert not server.bodies


def test_an_engine_that_lost_its_weights_gets_the_newest_and_samples_the_same_problems(
    work: Act, publish: Act, server: Server, sampler: Counted
) -> None:
    server.open.set()
    publish(max_waiting=ROUND + 1)
    answer, loads, seeds = sampler.answer_all, [], []

    def load(model: Path) -> None:
        loads.append((model / "model.safetensors").stat().st_ino)

    def lose(prompts: Any, params: Any, seed: int) -> Any:
        seeds.append(seed)
        if len(seeds) == 2:
            publish(max_waiting=ROUND + 1, version=3)
            raise WeightsLost("it was restarted")
        return answer(prompts, params, seed)

    sampler.load, sampler.answer_all = load, lose
    with pytest.raises(Enough):
        work(lambda: len(server.bodies) == 2 * ROUND)
    batches = sorted((rollout_of(body) for body in server.bodies), key=lambda batch: batch.id)
    assert [batch.index for batch in batches] == [*range(2 * ROUND)]
    assert [batch.policy_version for batch in batches] == [2] * ROUND + [3] * ROUND
    assert len(loads) == 2 and len(set(loads)) == 2 and seeds[1] == seeds[2] != seeds[0]


def test_finished_runs_and_other_runs_end_the_worker(work: Act, publish: Act) -> None:
    publish(run="theirs")
    with pytest.raises(UserError, match=r"run: .* holds weights of run 'theirs', not 'ours'"):
        work()
    publish(finished=True, version=3)
    with pytest.raises(RunFinished):
        work()


def test_an_upload_that_cannot_succeed_ends_the_wait(work: Act, publish: Act, server: Server) -> None:
    server.failure = RefServerError(403, "the role is too small", code="forbidden")
    server.open.set()
    publish()
    with pytest.raises(RefServerError, match="too small"):
        work(lambda: False)


def test_a_directory_that_is_deleted_file_by_file(work: Act, publish: Act, server: Server, tmp_path: Path) -> None:
    """The file that the worker needs may be the first to go, and the outbox's cursor the last."""
    publish(max_waiting=ROUND)

    def delete() -> None:
        server.called.wait(60)
        for batch in (tmp_path / "workers").glob("*/*.safetensors"):
            batch.unlink()
        server.open.set()  # the worker finds that the first delivered batch has no file
        server.wait_for(1)
        time.sleep(0.5)
        shutil.rmtree(tmp_path / "weights")
        shutil.rmtree(tmp_path / "workers")

    deleting = threading.Thread(target=delete)
    deleting.start()
    with pytest.raises(Enough, match="has not published weights"):
        work(lambda: not deleting.is_alive())
    deleting.join()
