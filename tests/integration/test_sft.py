"""Supervised fine-tuning as a process: stopped, killed and resumed, and its model trained by GRPO."""

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.demo.base_model import example
from policy_trainer.tasks.arithmetic import Arithmetic
from tests.integration.processes import Process, Server, steps_of, until
from tests.integration.runs import QUICK, train

OPTIONS = (
    "--threads", "1", "--optimizer.learning-rate", "4e-3", "--optimizer.betas", "0.9,0.99",
    "--checkpoint.save-steps", "5", "--eval-steps", "0",
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Additions with worked solutions."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    task, chance = Arithmetic(0), random.Random(0)
    with path.open("w") as file:
        for problem in map(task.problem, range(1600)):
            completion = example(problem, worked=True, chance=chance)
            file.write(json.dumps({"messages": list(problem.messages), "completion": completion}) + "\n")
    return path


def sft(model: Path, data: Path, run_dir: Path, *options: str) -> Process:
    return Process(
        "policy_trainer", "sft", "--model", str(model), "--data.path", str(data), "--run-dir", str(run_dir), *OPTIONS,
        *options, log=run_dir.parent / f"{run_dir.name}.log",
    )  # fmt: skip


def test_a_stopped_and_killed_run_resumes_and_grpo_trains_its_model(
    random_model: Path, data: Path, tmp_path: Path, start: Callable[..., Any]
) -> None:
    run_dir = tmp_path / "sft"

    stopped = start(sft(random_model, data, run_dir))
    until(lambda: len(steps_of(run_dir)) >= 7, "steps", stopped)
    os.kill(stopped.popen.pid, signal.SIGINT)
    assert stopped.wait() == 130
    done = len(steps_of(run_dir))
    assert f"stopped after {done} steps; add --resume to continue" in stopped.output()
    assert (run_dir / "checkpoints" / f"step-{done:08d}" / "model.safetensors").exists()

    killed = start(sft(random_model, data, run_dir, "--resume"))
    until(lambda: len(steps_of(run_dir)) >= done + 7, "steps", killed)
    killed.kill()

    resumed = start(sft(random_model, data, run_dir, "--resume"))
    assert resumed.wait() == 0, resumed.output()
    steps = steps_of(run_dir)
    assert [record["step"] for record in steps] == list(range(1, 46))
    assert steps[-1]["loss"] < 1 < 3 < steps[0]["loss"]
    assert "45 steps in" in resumed.output()

    server = start(Server(run_dir / "model", tmp_path / "server"))
    grpo = start(train(run_dir / "model", server, tmp_path / "grpo", "--max-steps", "2", *QUICK))
    assert grpo.wait() == 0, grpo.output()
    assert steps_of(tmp_path / "grpo")[0]["kl_at_step_0"] < 1e-9


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (['{"prompt": "a"}'], (), "data.jsonl:1: completion must be a text that is not empty"),
        (['{"prompt": "a", "completion": "b"}'], ("--batch-size", "0"), "batch_size: Input should be greater"),
    ],
)
def test_invalid_input_is_refused_without_a_traceback(
    random_model: Path,
    tmp_path: Path,
    start: Callable[..., Any],
    lines: list[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines))
    refused = start(sft(random_model, path, tmp_path / "run", *options))
    assert refused.wait() == 2
    assert message in refused.output() and "Traceback" not in refused.output()


@pytest.mark.slow
def test_two_at_a_time_in_one_directory_are_refused(
    random_model: Path, data: Path, tmp_path: Path, start: Callable[..., Any]
) -> None:
    run_dir = tmp_path / "sft"
    first = start(sft(random_model, data, run_dir))
    until(lambda: len(steps_of(run_dir)) >= 2, "steps", first)
    for options in ((), ("--resume",)):
        second = start(sft(random_model, data, run_dir, *options))
        assert second.wait() == 2
        assert f"run_dir: another trainer is at work in {run_dir}" in second.output()
    assert first.wait() == 0, first.output()
    assert [record["step"] for record in steps_of(run_dir)] == list(range(1, 46))
