"""`policy-trainer train` alone on a machine: it starts its reference server and its worker, and all ends together."""

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.run_files.server_address import read_url
from shared.client import RefServerClient, RefServerError
from tests.docs.pages import ROOT
from tests.integration.processes import Process, client_of, processes_of, steps_of, until
from tests.integration.runs import QUICK, train

# Lengths differ, so that a random model learns something.
OPTIONS = (*QUICK, "--device", "cpu", "--rewards", "accuracy", "length")


def alone(model: Path | str, run_dir: Path, *options: str) -> Process:
    return train(model, None, run_dir, *OPTIONS, *options)


def wait_for_the_end(run_dir: Path) -> None:
    until(lambda: not processes_of(run_dir), "every process of the run to end")


def test_one_command_trains_and_leaves_no_process(random_model: Path, tmp_path: Path, start: Any) -> None:
    run_dir = tmp_path / "alone"
    # The reference becomes the policy: its snapshots need no directory of their own.
    renewed = ("--reference.sync-steps", "2")
    trainer = start(alone(random_model, run_dir, "--max-steps", "3", *renewed))
    assert trainer.wait() == 0, trainer.output()
    assert steps_of(run_dir)[0]["reference_version_max"] == 1
    assert list((run_dir / "snapshots" / "alone").glob("epoch-0000-version-*"))
    assert "reference server: process" in trainer.output()
    assert not processes_of(run_dir)


def test_killed_it_ends_whole_and_resumes_with_its_queue(random_model: Path, tmp_path: Path, start: Any) -> None:
    run_dir = tmp_path / "killed"
    options = ("--max-steps", "12", "--checkpoint.save-steps", "3")
    trainer = start(alone(random_model, run_dir, *options))
    until(lambda: len(steps_of(run_dir)) >= 5, "step 5", trainer)
    trainer.kill()
    resumed = start(alone(random_model, run_dir, *options, "--resume"))  # at once: the old server still ends
    file = run_dir / "server.json"
    address = file.read_text()
    assert resumed.wait() == 0, resumed.output()
    assert file.read_text() == address, "the port and the token stay"
    token = json.loads(address)["token"].encode()
    logs = [path for path in (*run_dir.rglob("*"), trainer.log, resumed.log) if path.is_file() and path != file]
    assert not any(token in path.read_bytes() for path in logs)
    wait_for_the_end(run_dir)
    steps = steps_of(run_dir)
    assert [record["step"] for record in steps] == list(range(1, 13))
    # Nothing was lost with the processes, so that no problem is left out or sampled twice.
    problems = [problem for record in steps for problem in record["problems"]]
    assert len(problems) == len(set(problems)) == 48


def test_a_server_that_dies_is_started_again(random_model: Path, tmp_path: Path, start: Any) -> None:
    run_dir = tmp_path / "shaken"
    trainer = start(alone(random_model, run_dir, "--max-steps", "8"))
    until(lambda: len(steps_of(run_dir)) >= 2, "step 2", trainer)
    with client_of(run_dir) as client:
        assert client.model().name == str(random_model)
        url = client.url
    page = (ROOT / "docs" / "operations.md").read_text()
    (line,) = [line for line in page.splitlines() if line.endswith("curl -s -K -")]
    answer = subprocess.run(line.replace("runs/mine", str(run_dir)), shell=True, check=True, capture_output=True)
    assert json.loads(answer.stdout)["runs"]
    with RefServerClient(url) as stranger, pytest.raises(RefServerError, match="a token is required"):
        stranger.finish_run("shaken")
    servers = [pid for pid in processes_of(run_dir) if b"ref_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    subprocess.run(["kill", "-9", *map(str, servers)], check=True)
    assert trainer.wait() == 0, trainer.output()
    assert read_url(RunDirectory(run_dir)) == url
    assert "the reference server died with status -9" in trainer.output() and "starting it again" in trainer.output()
    assert not processes_of(run_dir)


def test_external_workers_find_the_server(random_model: Path, tmp_path: Path, start: Any) -> None:
    run_dir = tmp_path / "external"
    run_dir.mkdir()
    log = tmp_path / "worker.log"
    command = ("rollout", "--model", str(random_model), "--run-dir", str(run_dir), *QUICK[:6], *QUICK[8:10])
    worker = start(Process("policy_trainer", *command, "--rewards", "accuracy", "length", log=log))
    until(lambda: "the trainer has not started its reference server" in worker.output(), "the worker to wait", worker)
    trainer = start(alone(random_model, run_dir, "--max-steps", "2", "--rollout", "external"))
    assert trainer.wait() == 0, trainer.output()
    assert worker.wait() == 0, worker.output()


@pytest.mark.parametrize("model", ["/nowhere/model", "broken"])
def test_a_model_that_cannot_be_loaded_is_told_in_five_lines(model: str, tmp_path: Path, start: Any) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    name = str(broken) if model == "broken" else model
    trainer = start(alone(name, tmp_path / "run"))
    assert trainer.wait() == 2, trainer.output()
    said = trainer.output()
    assert len(said.splitlines()) <= 5 and "train: model:" in said and name in said, said
    assert not processes_of(tmp_path / "run")


def test_a_server_that_cannot_start_is_told_with_its_log(random_model: Path, tmp_path: Path, start: Any) -> None:
    run_dir = tmp_path / "run"
    trainer = start(alone(random_model, run_dir, "--reference.device", "cuda:77"))
    assert trainer.wait() == 1, trainer.output()
    assert "the reference server died with status 1; its last output" in trainer.output()
    assert "cuda" in trainer.output().lower() and "Traceback" not in trainer.output()
    assert not processes_of(run_dir)


def test_a_stop_while_the_server_loads_ends_all(random_model: Path, tmp_path: Path, start: Any) -> None:
    run_dir = tmp_path / "stopped"
    trainer = start(alone(random_model, run_dir))
    until(lambda: "reference server: process" in trainer.output(), "the server to start", trainer)
    trainer.popen.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert trainer.wait() == 130, trainer.output()
    assert not processes_of(run_dir) and time.monotonic() - began < 60


def test_a_dry_run_tells_of_every_stage_and_leaves_nothing(random_model: Path, tmp_path: Path, start: Any) -> None:
    home = tmp_path / "home"
    home.mkdir()
    trainer = start(alone(random_model, home / "mine", "--dry-run", "--optimizer.warmup-steps", "10"))
    assert trainer.wait() == 0, trainer.output()
    stages = ("load the policy", "rollout worker", "sample a group", "judge", "score", "learn", "publish", "checkpoint")
    assert all(stage in trainer.output() for stage in stages), trainer.output()
    assert "(accuracy 0, length -0." in trainer.output() and "peak memory of the trainer" in trainer.output()
    assert [path.name for path in home.iterdir()] == ["mine.log"]
    assert not processes_of(home)


def test_a_dry_run_fails_as_the_run_would(random_model: Path, tmp_path: Path, start: Any) -> None:
    home = tmp_path / "home"
    home.mkdir()
    data = ("--task", "jsonl", "--data.path", str(tmp_path / "missing.jsonl"))
    trainer = start(alone(random_model, home / "mine", "--dry-run", *data))
    assert trainer.wait() == 2, trainer.output()
    assert "missing.jsonl" in trainer.output() and "Traceback" not in trainer.output()
    assert [path.name for path in home.iterdir()] == ["mine.log"] and not processes_of(home)
