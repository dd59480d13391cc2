"""Workers and servers in several places: started by one command, on several devices, and without a shared directory."""

import json
import os
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
from tests.harness.processes import Process, processes_of, until
from tests.harness.runs import QUICK, assert_trained_exactly_once, client_of, rollout, steps_of, train
from tests.harness.server import Server

# Lengths differ, so that a random model learns something.
OPTIONS = (*QUICK, "--device", "cpu", "--rewards", "accuracy", "length")


def train_inline(model: Path | str, run_dir: Path, *options: str) -> Process:
    return train(model, None, run_dir, *OPTIONS, *options)


def wait_for_the_end(run_dir: Path) -> None:
    until(lambda: not processes_of(run_dir), "every process of the run to end")


def test_one_command_trains_and_leaves_no_process(random_model: Path, tmp_path: Path, start: Any) -> None:
    run_dir = tmp_path / "inline"
    # The reference becomes the policy: its snapshots need no directory of their own.
    renewed = ("--reference.sync-steps", "2")
    trainer = start(train_inline(random_model, run_dir, "--max-steps", "3", *renewed))
    assert trainer.wait() == 0, trainer.output()
    assert steps_of(run_dir)[0]["reference_version_max"] == 1
    assert list((run_dir / "snapshots" / "inline").glob("epoch-0000-version-*"))
    assert "reference server: process" in trainer.output()
    assert not processes_of(run_dir)


def test_killed_it_ends_whole_and_resumes_with_its_queue(random_model: Path, tmp_path: Path, start: Any) -> None:
    run_dir = tmp_path / "killed"
    options = ("--max-steps", "12", "--checkpoint.save-steps", "3")
    trainer = start(train_inline(random_model, run_dir, *options))
    until(lambda: len(steps_of(run_dir)) >= 5, "step 5", trainer)
    trainer.kill()
    resumed = start(train_inline(random_model, run_dir, *options, "--resume"))  # at once: the old server still ends
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
    trainer = start(train_inline(random_model, run_dir, "--max-steps", "8"))
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


def test_a_stop_while_the_server_loads_ends_all(random_model: Path, tmp_path: Path, start: Any) -> None:
    run_dir = tmp_path / "stopped"
    trainer = start(train_inline(random_model, run_dir))
    until(lambda: "reference server: process" in trainer.output(), "the server to start", trainer)
    trainer.popen.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert trainer.wait() == 130, trainer.output()
    assert not processes_of(run_dir) and time.monotonic() - began < 60


TWICE = ("--devices", "cpu", "cpu", "--threads", "1")


def logs_of(run_dir):
    return [(run_dir / "logs" / f"rollout-{k}.log") for k in (0, 1)]


def all_logs_contain(run_dir, words):
    return all(log.exists() and words in log.read_text() for log in logs_of(run_dir))


def children(run_dir, number):
    """The workers of that number."""
    option = f"--worker\0{number}\0".encode()
    return [pid for pid in processes_of(run_dir) if option in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_run_with_two_devices_of_each(random_model, tmp_path, start):
    run_dir = tmp_path / "several"
    server = start(Server(random_model, tmp_path, "--devices", "cpu", "cpu"))
    trainer = start(train(random_model, server, run_dir, *QUICK, "--max-steps", "4", "--rollout", "external"))
    until((run_dir / "config.toml").exists, "the run's settings", trainer)
    workers = start(rollout(run_dir, tmp_path / "workers.log", *TWICE))
    assert trainer.wait() == 0, trainer.output()
    assert workers.wait() == 0, workers.output()
    assert all_logs_contain(run_dir, "the run is finished"), workers.output()
    assert_trained_exactly_once(server, run_dir)
    assert not processes_of(run_dir)


def test_one_ctrl_c_ends_all_workers_and_a_dead_one_comes_back(random_model, tmp_path, start):
    run_dir = tmp_path / "ended"
    server = start(Server(random_model, tmp_path))
    trainer = start(train(random_model, server, run_dir, *QUICK, "--max-steps", "9999", "--rollout", "external"))
    until((run_dir / "config.toml").exists, "the run's settings", trainer)
    workers = start(rollout(run_dir, tmp_path / "workers.log", *TWICE))
    until(lambda: all_logs_contain(run_dir, "next_problem"), "both workers to sample", workers)
    (worker,) = children(run_dir, "1")
    os.kill(worker, signal.SIGKILL)
    second = logs_of(run_dir)[1]
    until(lambda: second.read_text().count("next_problem") > 1, "the killed worker to sample again", workers)
    workers.popen.send_signal(signal.SIGINT)
    assert workers.wait() == 130, workers.output()
    assert children(run_dir, "0") == children(run_dir, "1") == []


TRAINER, WORKER = "trainer-0123456789abcdef", "worker-0123456789abcdef"
STEPS = 8


def test_workers_need_a_url_and_a_token_alone(random_model: Path, tmp_path: Path, start) -> None:
    tokens = {"server": f"train {TRAINER}\nupload {WORKER} run=run\n", "trainer": TRAINER, "worker": WORKER}
    files = {name: tmp_path / f"{name}.tokens" for name in tokens}
    for name, text in tokens.items():
        files[name].write_text(text)
        files[name].chmod(0o600)
    server = start(Server(random_model, tmp_path / "server", "--token-file", str(files["server"])))
    place = tmp_path / "trainer" / "run"
    place.parent.mkdir()
    trainer = start(
        train(
            random_model, server.until_ready(), place, *QUICK, "--max-steps", str(STEPS), "--max-lag", "4",
            "--rollout", "external", "--weights", "server", "--token-file", str(files["trainer"]),
        )
    )  # fmt: skip
    workers = [
        start(
            Process(
                "policy_trainer", "rollout", "--server", server.url, "--run", "run",
                "--worker", str(worker), "--workers", "2", "--run-dir", str(tmp_path / f"worker-{worker}"),
                "--threads", "1", "--token-file", str(files["worker"]), log=tmp_path / f"worker-{worker}.log",
            )
        )
        for worker in range(2)
    ]  # fmt: skip
    assert trainer.wait() == 0, trainer.output() + workers[0].output()
    for worker in workers:
        assert worker.wait() == 0, worker.output()
        assert "the run is finished" in worker.output()
    steps = steps_of(place)
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    compared = [record["probe_logp_difference"] for record in steps]
    assert max(difference for difference in compared if difference is not None) < 1e-3
    assert max(record["staleness_max"] for record in steps) <= 4
    assert min(record["staleness"] for record in steps[2:]) < 4  # new weights do arrive
    assert [path.name for path in (place / "weights").iterdir()] == ["latest.json"]
    for worker in range(2):
        kept = [path.parent.name for path in (tmp_path / f"worker-{worker}").rglob("model.safetensors")]
        assert 1 <= len(kept) <= 2
        assert not list((tmp_path / f"worker-{worker}").rglob("*.tmp"))
