"""`policy-trainer launch` on a real Slurm: jobs that are killed, requeued, stopped and submitted again."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.harness.runs import QUICK, assert_trained_exactly_once, steps_of
from tests.harness.server import Server
from tests.harness.slurm import Slurm, Steps, launch, logs, submitted

pytestmark = pytest.mark.long


def check_batches(run_dir: Path, model: Path, directory: Path, postgresql: Path) -> None:
    """Checks in the queue, whose PostgreSQL is started again, that each batch was trained exactly once."""
    data = run_dir / "slurm" / "postgresql"
    sockets = f"-c listen_addresses= -c unix_socket_directories={directory}"
    log = directory / "postgresql.log"
    subprocess.run([postgresql / "pg_ctl", "start", "-w", "-D", data, "-l", log, "-o", sockets], check=True)
    try:
        with Server(model, directory, "--store", f"postgresql://tandem@/postgres?host={directory}") as server:
            assert_trained_exactly_once(server, run_dir)
    finally:
        subprocess.run([postgresql / "pg_ctl", "stop", "-D", data, "-m", "fast"], check=True)


def test_a_run_whose_jobs_are_killed_and_requeued(
    random_model: Path, tmp_path: Path, cluster: Slurm, postgresql: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A trainer of two ranks on two nodes, two workers, and a server. One after the other: the server's job, its
    PostgreSQL included, is killed and requeued; a rank is killed; the trainer's time is nearly up; so is that of
    a worker; the server is at another address. The run ends by itself, with each batch trained once."""
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "a place" / "run"
    launch(
        monkeypatch, "--nodes", "2", "--gpus-per-node", "0", "--workers", "2", "--sbatch=--cpus-per-task=2",
        "--model", str(random_model), "--run-dir", "a place/run", "--max-steps", "140",
        "--max-unrewarded-steps", "0", "--device", "cpu", *QUICK,
    )  # fmt: skip
    jobs, scripts, steps = submitted(capfd.readouterr().out), run_dir / "slurm", Steps(run_dir)
    steps.more(6)

    cluster.kill(jobs["server"])
    steps.until(lambda: cluster.states()[jobs["server"]] not in ("RUNNING", "COMPLETING"), "the server's job to end")
    cluster.call("scontrol", "requeue", jobs["server"])
    steps.more(10)

    cluster.kill(jobs["trainer"], "RANK=1")
    steps.until(lambda: "failure 1 of 3" in (scripts / "trainer.log").read_text(), "the trainer's failure")
    steps.more(10)

    cluster.call("scancel", "--batch", "--signal=USR1", jobs["trainer"])
    steps.until(lambda: "the time limit is near" in (scripts / "trainer.log").read_text(), "the trainer's requeueing")
    assert "add --resume to continue" in (scripts / "trainer.log").read_text()  # it wrote a checkpoint
    steps.more(10)

    cluster.call("scancel", "--batch", "--signal=USR1", f"{jobs['workers']}_1")
    steps.until(lambda: "the time limit is near" in (scripts / "worker-1.log").read_text(), "the worker's requeueing")
    assert cluster.states()[f"{jobs['workers']}_0"] == "RUNNING"
    steps.more(10)

    port = (scripts / "server.url").read_text().strip().rpartition(":")[2]
    (scripts / "server.url").write_text(f"http://127.0.0.1:{port}\n")
    steps.until(lambda: "server has moved" in (scripts / "worker-0.log").read_text(), "the worker to notice it")

    def ended() -> bool:
        return all(state == "COMPLETED" for state in cluster.states().values())

    steps.until(ended, "all jobs to end")
    assert (scripts / "ended").read_text() == "finished\n"
    assert (run_dir / "model").is_dir()
    assert {record["step"] for record in steps_of(run_dir)} == set(range(1, 141))
    check_batches(run_dir, random_model, tmp_path, postgresql)


def test_a_run_that_is_stopped_and_submitted_again(
    random_model: Path, tmp_path: Path, cluster: Slurm, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Without torchrun. Its jobs have no rights that they do not need."""
    run_dir = tmp_path / "run"
    launch(
        monkeypatch, "--gpus-per-node", "0", "--model", str(random_model), "--run-dir", str(run_dir),
        "--max-steps", "1000000", "--max-unrewarded-steps", "0", "--device", "cpu", *QUICK,
    )  # fmt: skip
    submitted(capfd.readouterr().out)
    scripts, steps = run_dir / "slurm", Steps(run_dir)
    steps.more(7)
    again = subprocess.run(["bash", scripts / "submit.sh"], check=False, capture_output=True, text=True)
    assert again.returncode == 1 and "jobs of this run are in the queue" in again.stderr
    (scripts / "ended").write_text("stopped\n")

    def all_ended() -> bool:
        return set(cluster.states().values()) == {"COMPLETED"}

    steps.until(all_ended, "the jobs to end")
    done = len(steps_of(run_dir))
    assert sorted((run_dir / "checkpoints").iterdir())[-1].name == f"step-{done:08d}"

    subprocess.run(["bash", scripts / "submit.sh"], check=True)
    steps.more(3)
    assert [record["step"] for record in steps_of(run_dir)][: done + 3] == list(range(1, done + 4))


def test_a_finished_run_goes_on_with_more_steps(
    random_model: Path, tmp_path: Path, cluster: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its worker begins first, and reads that the run is finished."""
    run_dir = tmp_path / "run"
    steps, common = Steps(run_dir), ("--gpus-per-node", "0", "--run-dir", str(run_dir))
    settings = ("--model", str(random_model), "--max-unrewarded-steps", "0", "--device", "cpu", *QUICK)

    def ended() -> bool:
        return (run_dir / "slurm" / "ended").exists() and not {"RUNNING", "PENDING"} & set(cluster.states().values())

    launch(monkeypatch, *common, *settings, "--max-steps", "6")
    steps.until(ended, "the run to finish")
    launch(monkeypatch, *common, "--resume", "--max-steps", "12")
    steps.until(lambda: not (run_dir / "slurm" / "ended").exists(), "the jobs to begin")
    steps.until(ended, "the run to finish again")
    assert [record["step"] for record in steps_of(run_dir)] == list(range(1, 13)), logs(run_dir / "slurm")
    assert (run_dir / "slurm" / "ended").read_text() == "finished\n"


def test_a_run_whose_trainer_is_cancelled_holds_no_nodes(
    random_model: Path, tmp_path: Path, cluster: Slurm, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run_dir = tmp_path / "run"
    launch(monkeypatch, "--gpus-per-node", "0", "--model", str(random_model), "--run-dir", str(run_dir), *QUICK)
    jobs, steps = submitted(capfd.readouterr().out), Steps(run_dir)
    steps.more(1)
    cluster.call("scancel", jobs["trainer"])
    steps.until(lambda: not {"RUNNING", "PENDING"} & set(cluster.states().values()), "the jobs to end")
    assert (run_dir / "slurm" / "ended").read_text() == "the job of the trainer has ended\n"


def test_a_run_whose_server_cannot_start_holds_no_nodes(
    random_model: Path, tmp_path: Path, cluster: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "initdb").write_text("#!/bin/sh\necho the disk is full >&2\nexit 1\n")
    (tmp_path / "initdb").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    run_dir = tmp_path / "run"
    launch(monkeypatch, "--gpus-per-node", "0", "--model", str(random_model), "--run-dir", str(run_dir), *QUICK)
    steps = Steps(run_dir)
    steps.until(lambda: not {"RUNNING", "PENDING"} & set(cluster.states().values()), "the jobs to end")
    assert (run_dir / "slurm" / "ended").read_text().startswith("PostgreSQL could not be started")
    assert "the disk is full" in (run_dir / "slurm" / "server.log").read_text()
    assert cluster.states()["1"] == "FAILED"
