"""With max_lag = 0 a seed gives the same run again, bit for bit, also after a kill and by two workers."""

import json
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shared.api import State
from shared.client import RefServerClient
from tests.harness.processes import Process, processes_of, until
from tests.harness.runs import QUICK, client_of, rollout, steps_of, train

OPTIONS = (
    *QUICK, "--task", "arithmetic", "--rewards", "tests.integration.varied:varied", "--max-lag", "0",
    "--loss.beta", "0.1", "--optimizer.learning-rate", "1e-3", "--checkpoint.save-steps", "3",
    "--evaluation.problems", "4", "--max-steps", "8",
)  # fmt: skip
# What depends on the clock, on the process, or on names that are drawn at random.
_ELSE = (
    "seconds", "share", "per_second", "batch_ids", "queued", "scoring", "ready", "expired", "dead", "epoch",
    "kl_noise_floor", "redelivered",
)  # fmt: skip


def run_again(start: Any, model: Path, run_dir: Path, seed: int, *options: str) -> Process:
    return start(train(model, None, run_dir, *OPTIONS, "--seed", str(seed), *options))


def figures(run_dir: Path) -> list[Mapping[str, Any]]:
    """The metrics of all steps that a run with the same bits has, too. A step that was done twice counts once."""
    steps = {step["step"]: step for step in steps_of(run_dir)}
    return [
        {name: value for name, value in steps[number].items() if not any(part in name for part in _ELSE)}
        for number in sorted(steps)
    ]


def weights(run_dir: Path) -> bytes:
    return (run_dir / "model" / "model.safetensors").read_bytes()


@pytest.fixture
def assert_same(tmp_path: Path) -> Any:
    def check(first: str, second: str) -> None:
        assert len(figures(tmp_path / first)) == 8
        # As text, in which NaN equals NaN.
        assert json.dumps(figures(tmp_path / first)) == json.dumps(figures(tmp_path / second))
        assert weights(tmp_path / first) == weights(tmp_path / second)

    return check


@pytest.mark.long
def test_two_seeds_twice_and_across_a_kill(random_model: Path, tmp_path: Path, start: Any, assert_same: Any) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1), ("d", 1)):
        process = run_again(start, random_model, tmp_path / name, seed)
        assert process.wait() == 0, process.output()
    assert_same("a", "b")
    assert_same("c", "d")
    assert weights(tmp_path / "a") != weights(tmp_path / "c")
    # Everything is killed between two checkpoints, in the middle of whatever it does.
    killed = run_again(start, random_model, tmp_path / "e", 0)
    until(lambda: len(steps_of(tmp_path / "e")) >= 5, "five steps", killed)
    killed.popen.send_signal(signal.SIGKILL)
    killed.popen.wait()
    until(lambda: not processes_of(tmp_path / "e"), "the server and the worker to end")
    resumed = run_again(start, random_model, tmp_path / "e", 0, "--resume")
    assert resumed.wait() == 0, resumed.output()
    assert_same("a", "e")
    assert all(step["staleness_max"] == 0 for step in steps_of(tmp_path / "e"))


@pytest.mark.long
def test_two_workers_of_which_one_is_killed(random_model: Path, tmp_path: Path, start: Any, assert_same: Any) -> None:
    """Groups that are sampled by themselves do not depend on who samples them."""
    for name in ("single", "pair"):
        options = ("--sampling.prompts-per-round", "1", "--rollout", "external")
        process, count = run_again(start, random_model, tmp_path / name, 0, *options), 1 if name == "single" else 2
        until(lambda name=name: (tmp_path / name / "config.toml").exists(), "the run's config.toml", process)

        def work(number: int, name: str = name, count: int = count) -> Process:
            place = ("--worker", str(number), "--workers", str(count))
            return start(rollout(tmp_path / name, tmp_path / f"{name}-{number}.log", *place))

        workers = [work(number) for number in range(count)]
        if count == 2:
            until(lambda: len(steps_of(tmp_path / "pair")) >= 3, "three steps", process)
            workers[1].kill()
            workers[1] = work(1)
        assert process.wait() == 0, process.output()
        assert [worker.wait() for worker in workers] == [0] * count
    assert_same("single", "pair")


@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.long)])
def test_groups_that_are_purged_are_replaced(random_model: Path, tmp_path: Path, start: Any, everything: bool) -> None:
    """The step in hand needs four, and nobody would sample another. If the server has nothing left, the worker samples
    all of them again; else the trainer asks for as many as are missing."""
    run_dir = tmp_path / "lost"
    options = ("--checkpoint.save-steps", "100", "--lease-seconds", "3", "--max-steps", "30")
    process = run_again(start, random_model, run_dir, 0, *options)
    until(lambda: len(steps_of(run_dir)) >= 2, "two steps", process)
    with client_of(run_dir) as client:
        chosen = until(lambda: stopped_before_a_step(process, client, run_dir), "groups that wait for a step", process)
        trained = [id for step in steps_of(run_dir) for id in step["batch_ids"]]
        for id in (*trained, *chosen) if everything else chosen[:2]:
            client.drop(id)
    process.popen.send_signal(signal.SIGCONT)
    assert process.wait() == 0, process.output()
    assert [step["step"] for step in steps_of(run_dir)] == [*range(1, 31)]


def stopped_before_a_step(process: Process, client: RefServerClient, run_dir: Path) -> list[str]:
    """Stops the trainer. Returns the groups of its next step; none, and it goes on, if they are not there."""
    process.popen.send_signal(signal.SIGSTOP)
    version = len(steps_of(run_dir))
    deadline = time.monotonic() + 5
    while len(ids := waiting(client, run_dir, version)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    if len(ids) < 4:
        process.popen.send_signal(signal.SIGCONT)
        time.sleep(0.03)  # elsewhere in the step than before
        return []
    return ids


def waiting(client: RefServerClient, run_dir: Path, version: int) -> list[str]:
    """The batches that weights of this version sampled, and that wait or are leased."""
    held = [batch for batch in client.batches(run=run_dir.name) if batch.policy_version == version]
    return [batch.id for batch in held if batch.state in (State.READY, State.LEASED)]
