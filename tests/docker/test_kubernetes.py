"""`policy-trainer launch --kubernetes`: its pods run as containers, with a trainer on two nodes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy_trainer.cli.launch.command import launch
from tests.docker.compose import docker, until
from tests.docker.pods import Pods

STEPS = 400
TRAINERS = ("it-trainer-0-0", "it-trainer-0-1")


@pytest.fixture
def pods(image: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pods]:
    monkeypatch.chdir(tmp_path)
    arguments = [
        "--kubernetes", "--dry-run", "--image", "tandem:cpu", "--nodes", "2", "--gpus-per-node", "0", "--workers", "2",
        "--run-dir", "runs/it", "--model", "/opt/demo/base", "--max-steps", str(STEPS), "--threads", "1",
        "--data.prompt-style", "plain", "--sampling.max-completion-length", "8", "--checkpoint.save-steps", "10",
        "--evaluation.eval-steps", "0", "--no-loss.drop-zero-variance",
    ]  # fmt: skip
    assert launch(arguments) == 0
    pods = Pods(Path("runs/it/kubernetes"), tmp_path / "pods")
    try:
        yield pods.start()
    finally:
        pods.remove()


def test_pods_that_are_killed_lose_nothing(pods: Pods, tmp_path: Path) -> None:
    """Containers that fail are started again, as by a Job. Workers that find the run finished wait for its end."""
    until(lambda: "step 20/" in pods.log(TRAINERS[0]), "step 20", pods)
    pods.signal(TRAINERS[1], "torchrun", "KILL")
    until(lambda: f"step 100/{STEPS}" in pods.log(TRAINERS[0]), "step 100", pods)
    pods.signal("it-server-0-0", "ref-server", "KILL")
    pods.signal("it-workers-0-1", "policy-trainer", "KILL")
    until(lambda: f"step 200/{STEPS}" in pods.log(TRAINERS[0]), "step 200", pods)
    pods.signal(TRAINERS[0], "torchrun", "TERM")  # as when its node is drained
    until(lambda: {pods.state(name) for name in TRAINERS} == {"exited 0"}, "both trainers to finish", pods)
    assert "stopping" in pods.log(TRAINERS[0])
    assert pods.restarts(TRAINERS[1]) >= 2 and pods.restarts("it-server-0-0") >= 1
    docker("cp", f"{pods.container(TRAINERS[0])}:/runs/it/metrics.jsonl", str(tmp_path))
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert {line["step"] for line in lines if line["kind"] == "step"} == set(range(1, STEPS + 1))
    docker("cp", f"{pods.container(TRAINERS[0])}:/runs/it/model", str(tmp_path))
    assert (tmp_path / "model" / "model.safetensors").stat().st_size > 1_000_000


def test_a_server_that_is_asked_to_end_is_not_done(pods: Pods) -> None:
    """Status 0 would complete its Job, and no other server would start."""
    until(lambda: "serving" in pods.log("it-server-0-0"), "the server to serve", pods)
    docker("stop", "--time", "40", pods.container("it-server-0-0"))
    assert pods.state("it-server-0-0") == "exited 1"
    assert "draining" in pods.log("it-server-0-0")
