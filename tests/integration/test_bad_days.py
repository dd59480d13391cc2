"""Nothing is lost or trained twice when processes are killed, restarted or interrupted, or runs share a server."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.reporting.samples import read_samples
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.weights.published.directory import WeightsDirectory
from shared.models import load_model
from tests.harness.postgresql import postgres
from tests.harness.processes import processes_of, until
from tests.harness.runs import QUICK, assert_trained_exactly_once, steps_of, train
from tests.harness.server import Server


def assert_server_has_the_metrics(server: Server, run_dir: Path) -> None:
    """The metrics that the server returns are those of the run's metrics.jsonl, with its settings and held-out answers.

    A trainer that is killed may not have sent the answers of its last second.
    """
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = sorted({record["step"] for record in records})
    url = f"/v1/runs/{run_dir.name}/metrics"
    whole = {step: server.get(f"{url}/{step}")["records"] for step in steps}
    of_kind = {kind: server.get(url, kind=kind) for kind in ("settings", "samples")}
    assert of_kind["settings"]["steps"] == [0]
    answers = {
        (group.step, str(group.problem)) for group in read_samples(run_dir / "samples.jsonl") if group.kind == "eval"
    }
    assert {
        (record["step"], record["name"]) for step in whole for record in whole[step] if record["kind"] == "samples"
    } <= answers
    reported = {step: [record for record in whole[step] if record["kind"] not in of_kind] for step in steps}

    def key(record: dict[str, Any]) -> tuple[str, str]:
        return record["kind"], record.get("name", "")

    for step in steps:
        assert reported[step] == sorted((record for record in records if record["step"] == step), key=key)
    curve = server.get(f"/v1/runs/{run_dir.name}/metrics", names=["reward"])
    assert curve["steps"] == [record["step"] for record in steps_of(run_dir)]
    assert curve["values"]["reward"] == [record["reward"] for record in steps_of(run_dir)]
    (listed,) = server.get("/v1/runs")["runs"]
    more = 1 + len(of_kind["samples"]["steps"])
    assert (listed["run"], listed["records"], listed["step"]) == (run_dir.name, len(records) + more, steps[-1])


def test_kill_and_resume_trains_nothing_twice(random_model, tmp_path, start):
    server = start(Server(random_model, tmp_path, "--queue.max-batches", "16")).until_ready()
    run_dir = tmp_path / "killed"
    options = (*QUICK, "--max-steps", "20", "--evaluation.eval-steps", "4")
    for after in (8, 13):
        resume = ("--resume",) if run_dir.exists() else ()
        trainer = start(train(random_model, server, run_dir, *options, *resume))
        until(lambda after=after: len(steps_of(run_dir)) >= after, f"step {after}", trainer)
        trainer.kill()
        until(lambda: not processes_of(run_dir), "the worker to end with its trainer")
    trainer = start(train(random_model, server, run_dir, *options, "--resume"))
    assert trainer.wait() == 0, trainer.output()
    steps = steps_of(run_dir)
    assert [record["step"] for record in steps] == list(range(1, 21))
    assert steps[-1]["epoch"] == 2
    assert_trained_exactly_once(server, run_dir)
    # The worker continued where it had stopped: no problem was drawn twice.
    problems = [problem for record in steps for problem in record["problems"]]
    assert len(problems) == len(set(problems)) == 80
    assert_server_has_the_metrics(server, run_dir)


def test_server_restarts_and_worker_dies(random_model, tmp_path, start):
    server = start(Server(random_model, tmp_path, "--queue.max-batches", "16"))
    run_dir = tmp_path / "shaken"
    trainer = start(train(random_model, server, run_dir, *QUICK, "--max-steps", "30"))
    until(lambda: len(steps_of(run_dir)) >= 4, "step 4", trainer)
    server.kill()
    until(lambda: "does not answer" in trainer.output(), "the trainer to say what it waits for", trainer)
    server = start(server.again())
    done = len(steps_of(run_dir))
    until(lambda: len(steps_of(run_dir)) > done, "a step with the new server", trainer)
    children = Path(f"/proc/{trainer.popen.pid}/task/{trainer.popen.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    assert trainer.wait() == 0, trainer.output()
    assert "the rollout worker died with status -9; its last output" in trainer.output()
    assert_trained_exactly_once(server, run_dir)


def test_interrupt_leaves_a_checkpoint_and_no_process(random_model, tmp_path, start):
    server = start(Server(random_model, tmp_path, "--queue.max-batches", "16"))
    run_dir = tmp_path / "interrupted"
    trainer = start(train(random_model, server, run_dir, *QUICK, "--max-steps", "1000"))
    until(lambda: len(steps_of(run_dir)) >= 7, "step 7", trainer)
    trainer.popen.send_signal(signal.SIGINT)
    assert trainer.wait() == 130, trainer.output()
    assert "--resume" in trainer.output()
    assert not processes_of(run_dir)
    done = len(steps_of(run_dir))
    resumed = start(train(random_model, server, run_dir, *QUICK, "--max-steps", str(done + 3), "--resume"))
    assert resumed.wait() == 0, resumed.output()
    steps = steps_of(run_dir)
    assert [record["step"] for record in steps] == list(range(1, done + 4))
    assert all(record.keys() == steps[1].keys() for record in steps[1:])
    assert steps[done]["eval_accuracy"] == steps[0]["eval_accuracy"] is not None
    assert f"step {done + 3}: held-out accuracy " in resumed.output()
    assert_trained_exactly_once(server, run_dir)


def test_sigterm_after_the_end_does_not_fail_the_run(random_model, tmp_path, start):
    """Compose sends it with --exit-code-from trainer: it stops all other services when the worker has ended."""
    server = start(Server(random_model, tmp_path, "--queue.max-batches", "16")).until_ready()
    run_dir = tmp_path / "finished"
    trainer = start(train(random_model, server, run_dir, *QUICK, "--max-steps", "3"))

    def is_finished() -> bool:
        publication = WeightsDirectory(RunDirectory(run_dir).weights).newest()
        return publication is not None and publication.finished

    until(is_finished, "the end to be published", trainer)
    trainer.popen.send_signal(signal.SIGTERM)
    assert trainer.wait() == 0, trainer.output()
    load_model(str(run_dir / "model"), revision=None, device="cpu", dtype="auto")


RARELY = ("--checkpoint.save-steps", "1000", "--max-steps", "14")


def settled_at(server: Server, run_dir: Path) -> int:
    """The step of the checkpoint that the first batch was settled with."""
    batch = server.get(f"/v1/batches/{steps_of(run_dir)[0]['batch_ids'][0]}")
    return int(batch["history"][-1]["detail"].removeprefix("in checkpoint step-"))


def test_checkpoints_come_early_when_half_of_the_leases_wait_for_one(random_model, tmp_path, start):
    server = start(Server(random_model, tmp_path, "--queue.max-in-flight", "16")).until_ready()
    refused = start(train(random_model, server, tmp_path / "refused", *QUICK, *RARELY, "--groups-per-step", "5"))
    assert refused.wait() == 2
    assert "groups_per_step: a step needs 5 groups, which must be at most half of the 8" in refused.output()
    run_dir = tmp_path / "few"
    trainer = start(train(random_model, server, run_dir, *QUICK, *RARELY))
    assert trainer.wait() == 0, trainer.output()
    assert_trained_exactly_once(server, run_dir)
    assert settled_at(server, run_dir) == 1


@pytest.mark.long
def test_a_run_continues_when_the_bound_is_lowered(random_model, tmp_path, start):
    """The trainer still uses the old bound, of which its 14 steps lease less than half."""
    server = start(Server(random_model, tmp_path, "--queue.max-in-flight", "128"))
    run_dir = tmp_path / "lowered"
    trainer = start(train(random_model, server, run_dir, *QUICK, *RARELY))
    until(lambda: len(steps_of(run_dir)) >= 3, "step 3", trainer)
    server.kill()
    server = start(Server(random_model, tmp_path, "--queue.max-in-flight", "8", port=server.port))
    assert trainer.wait() == 0, trainer.output()
    assert "Traceback" not in trainer.output()
    assert_trained_exactly_once(server, run_dir)
    assert settled_at(server, run_dir) < 14, "an early checkpoint must have acked leases"


@pytest.mark.long
def test_two_runs_at_once(random_model: Path, tmp_path: Path, start) -> None:
    with postgres() as cluster:
        shared = ("--store", cluster.create_database("shared"))
        servers = [start(Server(random_model, tmp_path / name, *shared)) for name in ("one", "two")]
        trainers = {
            name: start(
                train(random_model, servers[-place].until_ready(), tmp_path / name, *QUICK, "--max-steps", "10")
            )
            for place, name in enumerate(("first", "second"))
        }
        for name, trainer in trainers.items():
            assert trainer.wait() == 0, trainer.output()
            assert [record["step"] for record in steps_of(tmp_path / name)] == list(range(1, 11))
            for server in servers:  # the same store behind both
                assert_trained_exactly_once(server, tmp_path / name)


def test_one_of_two_servers_dies(random_model: Path, tmp_path: Path, start) -> None:
    """The other server scores what it had begun; the trainer, which uses the other server, is not affected."""
    with postgres() as cluster:
        shared = ("--store", cluster.create_database("shared"))
        servers = [start(Server(random_model, tmp_path / name, *shared)) for name in ("one", "two")]
        run_dir = tmp_path / "run"
        trainer = start(train(random_model, servers[1].until_ready(), run_dir, *QUICK, "--max-steps", "20"))
        until(lambda: len(steps_of(run_dir)) >= 5, "step 5", trainer)
        servers[0].until_ready().kill()
        assert trainer.wait() == 0, trainer.output()
        assert_trained_exactly_once(servers[1], run_dir)
