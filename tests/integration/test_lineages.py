"""Runs of one name do not mix: directories that are deleted and begun again, and trainers of one name."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.client import RefServerClient
from tests.harness.batches import make_batch
from tests.harness.processes import Process, until
from tests.harness.runs import QUICK, steps_of, train
from tests.harness.server import Server

# A few more batches than are trained wait in the server.
OPTIONS = (*QUICK, "--checkpoint.save-steps", "2")


def last_words(trainer: Process) -> str:
    return trainer.output()[-2000:]


def own_lineage(run_dir: Path, server: Server) -> dict[str, dict[str, Any]]:
    """The batches of this directory's run on the server, by id."""
    lineage = json.loads((run_dir / "run.json").read_text())["lineage"]
    return {batch["id"]: batch for batch in server.batches(run=run_dir.name) if batch["lineage"] == lineage}


def assert_trained_its_own(run_dir: Path, server: Server, steps: int) -> None:
    records = steps_of(run_dir)
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    assert all(record["staleness"] >= 0 for record in records)
    batches = own_lineage(run_dir, server)
    assert {id for record in records for id in record["batch_ids"]} <= batches.keys()


def delete(run_dir: Path) -> None:
    """rm -rf, again where a process that is just ending writes into it."""

    def is_gone() -> bool:
        shutil.rmtree(run_dir, ignore_errors=True)
        return not run_dir.exists()

    until(is_gone, "the directory to be gone")


@pytest.mark.long
def test_a_directory_that_is_deleted_and_begun_again(random_model: Path, tmp_path: Path, start: Any) -> None:
    """After kill -9 the server considers the trainer alive for a while; the next trainer reports that and waits."""
    server = start(Server(random_model, tmp_path)).until_ready()
    run_dir = tmp_path / "same"
    first = start(train(random_model, server, run_dir, *OPTIONS, "--max-steps", "500"))
    until(lambda: len(steps_of(run_dir)) >= 3, "step 3", first)
    first.kill()
    left = {batch["id"] for batch in server.batches(run="same") if batch["state"] != "done"}
    delete(run_dir)
    again = start(train(random_model, server, run_dir, *OPTIONS, "--max-steps", "6"))
    assert again.wait() == 0, last_words(again)
    assert "run 'same' was trained by another trainer a moment ago: waiting up to" in again.output()
    assert_trained_its_own(run_dir, server, 6)
    assert not left & {id for record in steps_of(run_dir) for id in record["batch_ids"]}
    states = {batch["id"]: (batch["state"], batch["reason"]) for batch in server.batches(run="same")}
    assert {states[id] for id in left} == {("expired", "abandoned")}
    assert {state for state, _ in states.values()} <= {"done", "expired"}, "a finished run leaves nothing waiting"


@pytest.mark.long
def test_two_trainers_of_one_name(random_model: Path, tmp_path: Path, start: Any) -> None:
    """The second is refused with a remedy, in its own directory and in the first's; the first continues."""
    server = start(Server(random_model, tmp_path)).until_ready()
    first_run, second_run = tmp_path / "one" / "same", tmp_path / "two" / "same"
    for parent in (first_run.parent, second_run.parent):
        parent.mkdir()
    options = (*OPTIONS, "--max-steps", "100000")
    first = start(train(random_model, server, first_run, *options))
    until(lambda: len(steps_of(first_run)) >= 2, "step 2", first)
    second, twin = (start(train(random_model, server, place, *options)) for place in (second_run, first_run))
    assert twin.wait() == 2
    assert "run_dir: another trainer is at work in" in twin.output()
    assert second.wait() == 1, last_words(second)
    assert "run: another trainer trains a run named 'same' on this server" in second.output()
    assert "choose another name with --run, or another --run-dir" in second.output()
    assert "Traceback" not in second.output() + twin.output()
    done = len(steps_of(first_run))
    until(lambda: len(steps_of(first_run)) > done + 2, "further steps", first)
    first.popen.send_signal(signal.SIGINT)
    first.wait()
    assert_trained_its_own(first_run, server, len(steps_of(first_run)))
    assert not steps_of(second_run)


@pytest.mark.long
def test_a_sampler_that_goes_on_with_the_epoch_before_a_resume_is_named(
    random_model: Path, tmp_path: Path, start: Any
) -> None:
    """Its batches are used up to the version from which the run resumed; later ones are abandoned."""
    server = start(Server(random_model, tmp_path)).until_ready()
    run_dir = tmp_path / "external"
    options = (*QUICK, "--groups-per-step", "1", "--rollout", "external", "--max-steps", "9", "--publish-every", "1")
    latest = run_dir / "weights" / "latest.json"

    def sample(client: RefServerClient, epoch: int) -> None:
        published = json.loads(latest.read_text())
        names = {name: published[name] for name in ("run", "lineage")}
        times = {"epoch": epoch, "policy_version": published["version"]}
        logps = np.full(16, -1, np.float32)
        batch = make_batch(np.random.default_rng(0), 2, [4] * 4, **names, **times, sampler_logps=logps)
        client.upload(batch)

    def step(epoch: int, number: int) -> None:
        until(lambda: latest.exists() and json.loads(latest.read_text())["version"] == number - 1, "weights", trainer)
        sample(client, epoch)
        until(lambda: len(steps_of(run_dir)) >= number, f"step {number}", trainer)

    with RefServerClient(server.url) as client:
        trainer = start(train(random_model, server, run_dir, *options))
        step(0, 1)
        trainer.popen.send_signal(signal.SIGINT)
        trainer.wait()
        trainer = start(train(random_model, server, run_dir, *options, "--resume"))
        until(lambda: json.loads(latest.read_text())["epoch"] == 1, "the weights of the next epoch", trainer)
        step(0, 2)
        until(lambda: json.loads(latest.read_text())["version"] == 2, "weights of step 2", trainer)
        sample(client, 0)
        reason = "batches arrive but are abandoned: the newest has epoch 0, policy_version 2"
        until(lambda: reason in " ".join(trainer.output().split()), "the reason for waiting", trainer)
        step(1, 3)
