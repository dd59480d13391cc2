"""Training under torchrun: killed, interrupted, and resumed on another number of ranks."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.models import load_model
from tests.harness.ports import free_port
from tests.harness.processes import Process, processes_of, until
from tests.harness.runs import QUICK, assert_trained_exactly_once, steps_of, torchrun
from tests.harness.server import Server

STEPS = 28


@pytest.mark.long
def test_a_killed_rank_ends_the_job_and_any_number_of_ranks_goes_on(random_model: Path, tmp_path: Path, start) -> None:
    """Two ranks, one of them killed; three, interrupted by Ctrl-C; two, whose torchrun is killed; one process
    without torchrun, killed; one rank to the end. Each batch is trained once."""
    server = start(Server(random_model, tmp_path / "server")).until_ready()
    place = tmp_path / "run"

    command = (
        "train", "--model", str(random_model), "--server", server.url, "--run-dir", str(place),
        "--max-steps", str(STEPS), "--device", "cpu", *QUICK,
    )  # fmt: skip

    def begin(ranks: int, *options: str) -> Process:
        return start(torchrun(ranks, *command, *options, log=tmp_path / f"{ranks}.log"))

    def until_checkpoint(step: int, process: Process) -> None:
        target = place / "checkpoints" / f"step-{step:08d}"
        until(target.exists, f"the checkpoint of step {step}", process)

    job = begin(2)
    until_checkpoint(5, job)
    os.kill(follower_of(place), signal.SIGKILL)
    assert job.wait() == 1
    assert "another of the 2 ranks ended" in job.output() and "--resume" in job.output()

    job = begin(3, "--resume")
    until_checkpoint(10, job)
    job.popen.send_signal(signal.SIGINT)
    assert job.wait() != 0
    assert "add --resume to continue" in job.output()
    done = len(steps_of(place))
    assert 10 <= done < STEPS

    job = begin(2, "--resume")
    until_checkpoint(15, job)
    job.kill()
    until(lambda: not processes_of(place), "the ranks to end", job)
    assert "torchrun has ended" in job.output()

    single = start(Process("policy_trainer", *command, "--resume", log=tmp_path / "single.log"))
    until_checkpoint(20, single)
    single.kill()

    job = begin(1, "--resume")
    assert job.wait() == 0, job.output()
    assert [record["step"] for record in steps_of(place)] == list(range(1, STEPS + 1))
    assert_trained_exactly_once(server, place)
    exported = start(
        Process(
            "policy_trainer", "export", "--checkpoint", str(place / "checkpoints" / f"step-{STEPS:08d}"),
            "--output", str(tmp_path / "exported"), log=tmp_path / "export.log",
        )
    )  # fmt: skip
    assert exported.wait() == 0, exported.output()
    trained, exported_model = (
        load_model(str(path), revision=None, device="cpu", dtype="auto").state_dict()
        for path in (place / "model", tmp_path / "exported")
    )
    assert trained.keys() == exported_model.keys() and all(
        torch.equal(trained[name], exported_model[name]) for name in exported_model
    )


@pytest.mark.slow
def test_a_node_that_is_stopped_stops_the_other(random_model: Path, tmp_path: Path, start: Any) -> None:
    """A torchrun on each of two nodes. Only the first is asked to stop, as when its node is drained: the other one
    must not end as if the run were finished, since nothing would start it again."""
    server = start(Server(random_model, tmp_path / "server")).until_ready()
    place, port = tmp_path / "run", free_port()

    def begin(node: int) -> Process:
        launcher = (
            "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}",
            "--rdzv-conf", f"is_host={not node}", "-m", "policy_trainer",
        )  # fmt: skip
        command = (
            "train", "--model", str(random_model), "--server", server.url, "--run-dir", str(place),
            "--max-steps", "400", "--device", "cpu", "--resume", *QUICK,
        )  # fmt: skip
        return start(Process("torch.distributed.run", *launcher, *command, log=tmp_path / f"{node}.log"))

    nodes = [begin(node) for node in (0, 1)]
    until((place / "checkpoints" / "step-00000005").exists, "a checkpoint", nodes[0])
    nodes[0].popen.send_signal(signal.SIGTERM)
    assert [node.wait() for node in nodes] == [1, 1]
    assert "add --resume to continue" in nodes[0].output()
    assert 5 <= len(steps_of(place)) < 400


def follower_of(run_dir: Path) -> int:
    """A process of the job whose rank is 1."""
    for pid in processes_of(run_dir):
        if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes():
            return pid
    raise AssertionError("no process has rank 1")


def test_what_rank_0_refuses_is_printed_once_and_without_tracebacks(random_model: Path, tmp_path: Path, start) -> None:
    options = ("--model", str(random_model), "--run-dir", str(tmp_path / "run"), "--optimizer.offload", "cpu", *QUICK)
    job = start(torchrun(2, "train", *options, log=tmp_path / "log"))
    assert job.wait() == 1
    assert job.output().count("the ranks divide the optimizer's memory; leave it out") == 1
    assert "rank 0 has ended" in job.output() and "[rank" not in job.output()


@pytest.mark.parametrize(
    ("options", "status"),
    [pytest.param((), 0, marks=pytest.mark.long), (("--task", "jsonl", "--data.path", "none.jsonl"), 1)],
)
def test_the_doctor_takes_one_group_through_all_ranks(
    options: tuple[str, ...], status: int, random_model: Path, tmp_path: Path, start
) -> None:
    home = tmp_path / "runs"
    home.mkdir()
    place = ("--model", str(random_model), "--run-dir", str(home / "mine"), "--device", "cpu")
    job = start(torchrun(2, "doctor", *place, *QUICK, *options, log=tmp_path / "log"))
    assert job.wait() == status, job.output()
    assert job.output().count("the run may begin" if status == 0 else "1 problem: fix it") == 1, job.output()
    if status == 0:
        assert "each of 2 ranks loads its part" in job.output() and "peak memory" in job.output()
    assert "[rank" not in job.output() and not list(home.iterdir()) and not processes_of(home)


def test_torchrun_is_for_training_and_its_checks(tmp_path: Path, start) -> None:
    job = start(torchrun(1, "presets", log=tmp_path / "log"))
    assert job.wait() == 1 and "torchrun is only for train and doctor" in job.output()
