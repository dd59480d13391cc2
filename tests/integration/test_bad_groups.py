"""A group on which every step fails is set aside, in the end for good; the others train exactly once."""

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy_trainer.run_files.run_directory import RunDirectory
from shared.api import State
from shared.client import RefServerClient
from tests.harness.batches import make_batch
from tests.harness.processes import Process, until
from tests.harness.runs import steps_of
from tests.harness.server import Server

# Tokens of a group, prompt and completions, for which memory suffices.
LIMIT = 20


@pytest.fixture
def client(tmp_path: Path, start: Any) -> Iterator[RefServerClient]:
    with RefServerClient(start(Server(None, tmp_path)).url) as client:
        yield client


def trainer(model: Path, client: RefServerClient, run_dir: Path, ending: str, *options: str) -> Process:
    return Process(
        "tests.integration.short_memory", str(LIMIT), ending, "train", "--model", str(model), "--server", client.url,
        "--run-dir", str(run_dir), "--rollout", "external", "--threads", "1", "--loss.beta", "0",
        "--sampling.max-completion-length", "64", "--evaluation.problems", "1", "--evaluation.eval-steps", "0",
        "--checkpoint.save-steps", "1", *options,
        log=run_dir.parent / "trainer.log",
    )  # fmt: skip


def upload(client: RefServerClient, run_dir: Path, run: Process, lengths: Sequence[int]) -> list[str]:
    """A group for each length of its two completions."""
    until(lambda: RunDirectory(run_dir).lineage or run.popen.poll(), "the run to begin", run)
    lineage = RunDirectory(run_dir).lineage
    numbers = np.random.default_rng(0)
    batches = [
        make_batch(
            numbers, 2, [length] * 2, run=run_dir.name, lineage=lineage,
            sampler_logps=np.full(2 * length, -1, np.float32),
        )
        for length in lengths
    ]  # fmt: skip
    return [client.upload(batch).id for batch in batches]


def trained(run_dir: Path) -> list[str]:
    return [id for record in steps_of(run_dir) for id in record["batch_ids"]]


@pytest.mark.parametrize("groups_per_step", [1, pytest.param(2, marks=pytest.mark.long)])
def test_it_is_dead_after_max_deliveries(
    client: RefServerClient, random_model: Path, tmp_path: Path, start: Any, groups_per_step: int
) -> None:
    run_dir = tmp_path / "run"
    options = ("--groups-per-step", str(groups_per_step), "--max-steps", "1000")
    first = start(trainer(random_model, client, run_dir, "raise", *options))
    bad, *good = upload(client, run_dir, first, [50, *[4] * 2 * groups_per_step])
    until(lambda: client.batch(bad).deliveries, "the group to be given back with its error", first)
    first.popen.send_signal(signal.SIGINT)
    assert first.wait() == 130, first.output()
    assert client.batch(bad).state == State.READY
    resumed = start(trainer(random_model, client, run_dir, "raise", *options, "--resume"))
    good += upload(client, run_dir, resumed, [4] * 18 * groups_per_step)
    until(lambda: len(trained(run_dir)) == len(good), "all others to be trained", resumed)
    resumed.popen.send_signal(signal.SIGINT)
    assert resumed.wait() == 130, resumed.output()
    assert sorted(trained(run_dir)) == sorted(good)
    assert {batch.id for batch in client.batches(State.DONE)} == set(good)
    dead = client.batch(bad)
    assert (dead.state, dead.deliveries) == (State.DEAD, 5)
    assert "a prompt of 2 tokens with 2 completions of up to 50" in (dead.reason or "")
    assert "RuntimeError" in (dead.reason or "") and "--gradient-checkpointing" in (dead.reason or "")


@pytest.mark.parametrize("groups_per_step", [pytest.param(1, marks=pytest.mark.long), 2])
def test_two_that_fail_alike_stop_the_run_and_stay(
    client: RefServerClient, random_model: Path, tmp_path: Path, start: Any, groups_per_step: int
) -> None:
    run_dir = tmp_path / "run"
    options = ("--groups-per-step", str(groups_per_step), "--max-steps", "2")
    run = start(trainer(random_model, client, run_dir, "raise", *options))
    bad = upload(client, run_dir, run, [50, 60])
    for _ in range(2):
        assert run.wait() == 1, run.output()
        assert "Two groups failed alike" in run.output() and "Traceback" in run.output()
        assert [(batch.id, batch.state) for batch in client.batches()] == [(id, State.READY) for id in bad]
        assert [client.batch(id).deliveries for id in bad] == [0, 0]
        run = start(trainer(random_model, client, run_dir, "raise", *options, "--resume"))


def test_once_an_update_has_begun_the_process_ends(
    client: RefServerClient, random_model: Path, tmp_path: Path, start: Any
) -> None:
    """The second of two minibatches fails: weights of half a step are not kept."""
    run_dir = tmp_path / "run"
    options = ("--groups-per-step", "2", "--minibatches", "2", "--max-steps", "2")
    first = start(trainer(random_model, client, run_dir, "raise", *options))
    good, bad, *_ = upload(client, run_dir, first, [4, 50, 4, 4, 4])
    assert first.wait() == 1, first.output()
    assert not trained(run_dir)
    assert [client.batch(id).deliveries for id in (good, bad)] == [0, 1]
    resumed = start(trainer(random_model, client, run_dir, "raise", *options, "--resume"))
    until(lambda: client.batch(bad).deliveries == 2, "the second failure", resumed)
    assert resumed.wait() == 1, resumed.output()
    assert client.batch(good).deliveries == 0


@pytest.mark.long
def test_one_that_kills_the_process_is_dead_after_max_deliveries(
    client: RefServerClient, random_model: Path, tmp_path: Path, start: Any
) -> None:
    run_dir = tmp_path / "run"
    options = ("--groups-per-step", "1", "--max-steps", "1")
    run = start(trainer(random_model, client, run_dir, "kill", *options))
    bad, good = upload(client, run_dir, run, [50, 4])
    for _ in range(5):
        assert run.wait() == -9, run.output()
        run = start(trainer(random_model, client, run_dir, "kill", *options, "--resume"))
    assert run.wait() == 0, run.output()
    assert trained(run_dir) == [good]
    assert client.batch(bad).state == State.DEAD
