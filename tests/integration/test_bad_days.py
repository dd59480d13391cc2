"""Nothing is lost, and nothing trained twice, when one of the three processes is killed, restarted or interrupted."""

import os
import signal
from pathlib import Path

from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.weights.directory import WeightsDirectory
from shared.models import load_model
from tests.integration.processes import Server, processes_of, steps_of, until
from tests.integration.runs import QUICK, assert_trained_exactly_once, train


def test_kill_and_resume_trains_nothing_twice(random_model, tmp_path, start):
    server = start(Server(random_model, tmp_path, None, "--queue.max-batches", "16")).until_ready()
    run_dir = tmp_path / "killed"
    for after in (8, 13):
        resume = ("--resume",) if run_dir.exists() else ()
        trainer = start(train(random_model, server, run_dir, *QUICK, "--max-steps", "20", *resume))
        until(lambda after=after: len(steps_of(run_dir)) >= after, f"step {after}", trainer)
        trainer.kill()
        until(lambda: not processes_of(run_dir), "the worker to end with its trainer")
    trainer = start(train(random_model, server, run_dir, *QUICK, "--max-steps", "20", "--resume"))
    assert trainer.wait() == 0, trainer.output()
    steps = steps_of(run_dir)
    assert [record["step"] for record in steps] == list(range(1, 21))
    assert steps[-1]["epoch"] == 2
    assert_trained_exactly_once(server, run_dir)
    # The worker continued where it had stopped: no problem was drawn twice.
    problems = [problem for record in steps for problem in record["problems"]]
    assert len(problems) == len(set(problems)) == 80


def test_server_restarts_and_worker_dies(random_model, tmp_path, start):
    server = start(Server(random_model, tmp_path, None, "--queue.max-batches", "16"))
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
    server = start(Server(random_model, tmp_path, None, "--queue.max-batches", "16"))
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
    server = start(Server(random_model, tmp_path, None, "--queue.max-batches", "16")).until_ready()
    run_dir = tmp_path / "finished"
    trainer = start(train(random_model, server, run_dir, *QUICK, "--max-steps", "3"))

    def is_finished() -> bool:
        publication = WeightsDirectory(RunDirectory(run_dir).weights).newest()
        return publication is not None and publication.finished

    until(is_finished, "the end to be published", trainer)
    trainer.popen.send_signal(signal.SIGTERM)
    assert trainer.wait() == 0, trainer.output()
    load_model(str(run_dir / "model"), revision=None, device="cpu", dtype="auto")
