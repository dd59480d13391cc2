"""A reference on two devices, and a worker on each of two by one command. The devices are the CPU, twice."""

import os
import signal
from pathlib import Path

from tests.integration.processes import Process, Server, processes_of, until
from tests.integration.runs import QUICK, assert_trained_exactly_once, train


def rollout(run_dir, log):
    command = ("rollout", "--config", str(run_dir / "config.toml"), "--devices", "cpu", "cpu", "--threads", "1")
    return Process("policy_trainer", *command, log=log)


def logs_of(run_dir):
    return [(run_dir / "logs" / f"rollout-{k}.log") for k in (0, 1)]


def told(run_dir, words):
    return all(log.exists() and words in log.read_text() for log in logs_of(run_dir))


def children(run_dir, number):
    """The workers of that number."""
    option = f"--worker\0{number}\0".encode()
    return [pid for pid in processes_of(run_dir) if option in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_run_with_two_devices_of_each(random_model, tmp_path, start):
    run_dir = tmp_path / "several"
    server = start(Server(random_model, tmp_path, None, "--devices", "cpu", "cpu"))
    trainer = start(train(random_model, server, run_dir, *QUICK, "--max-steps", "4", "--rollout", "external"))
    until((run_dir / "config.toml").exists, "the run's settings", trainer)
    workers = start(rollout(run_dir, tmp_path / "workers.log"))
    assert trainer.wait() == 0, trainer.output()
    assert workers.wait() == 0, workers.output()
    assert told(run_dir, "the run is finished"), workers.output()
    assert_trained_exactly_once(server, run_dir)
    assert not processes_of(run_dir)


def test_workers_that_share_no_directory_with_the_trainer(random_model, tmp_path, start):
    server = start(Server(random_model, tmp_path))
    run_dir, elsewhere = tmp_path / "trainers", tmp_path / "workers"
    options = ("--max-steps", "4", "--rollout", "external", "--weights", "server", "--run", "run")
    trainer = start(train(random_model, server, run_dir, *QUICK, *options))
    own = ("--server", server.url, "--run", "run", "--run-dir", str(elsewhere), "--devices", "cpu", "cpu")
    workers = start(Process("policy_trainer", "rollout", *own, "--threads", "1", log=tmp_path / "workers.log"))
    assert trainer.wait() == 0, trainer.output()
    assert workers.wait() == 0, workers.output()
    assert told(elsewhere, "the run is finished"), workers.output()
    assert not processes_of(elsewhere)


def test_one_ctrl_c_ends_all_workers_and_a_dead_one_comes_back(random_model, tmp_path, start):
    run_dir = tmp_path / "ended"
    server = start(Server(random_model, tmp_path))
    trainer = start(train(random_model, server, run_dir, *QUICK, "--max-steps", "9999", "--rollout", "external"))
    until((run_dir / "config.toml").exists, "the run's settings", trainer)
    workers = start(rollout(run_dir, tmp_path / "workers.log"))
    until(lambda: told(run_dir, "next_problem"), "both workers to sample", workers)
    (one,) = children(run_dir, "1")
    os.kill(one, signal.SIGKILL)
    second = logs_of(run_dir)[1]
    until(lambda: second.read_text().count("next_problem") > 1, "the killed worker to sample again", workers)
    workers.popen.send_signal(signal.SIGINT)
    assert workers.wait() == 130, workers.output()
    assert children(run_dir, "0") == children(run_dir, "1") == []
