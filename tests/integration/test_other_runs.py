"""Other ways to train: fine-tuning, the demo, distillation, and replay of a recorded run."""

import json
import math
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from policy_trainer.cli.demo.base_model import example, make_model, make_tokenizer
from policy_trainer.data.tasks.arithmetic import Arithmetic
from shared.models import save_model
from tests.harness.processes import Process, processes_of, until
from tests.harness.runs import QUICK, steps_of, train
from tests.harness.server import Server

SFT_OPTIONS = (
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
        "policy_trainer", "sft", "--model", str(model), "--data.path", str(data), "--run-dir", str(run_dir),
        *SFT_OPTIONS, *options, log=run_dir.parent / f"{run_dir.name}.log",
    )  # fmt: skip


@pytest.mark.long
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


# Rewards differ, so that a random model learns something.
REWARD = "tests.integration.own_rewards:letters"
REPLAY_OPTIONS = (*QUICK, "--device", "cpu", "--rewards", REWARD, "--optimizer.learning-rate", "1e-3")


@pytest.mark.long
def test_a_recorded_run_is_replayed_to_the_bit(random_model: Path, tmp_path: Path, start: Any) -> None:
    run_dir, recorded = tmp_path / "run", tmp_path / "recorded"

    def command(name: str, *options: str) -> None:
        process = start(Process("policy_trainer", name, *options, log=tmp_path / "log"))
        assert process.wait() == 0, process.output()

    settings = ("--model", str(random_model), "--run-dir", str(run_dir), *REPLAY_OPTIONS, "--record", str(recorded))
    command("train", *settings, "--max-steps", "2")
    command("train", "--resume", "--run-dir", str(run_dir), "--max-steps", "2")  # it was the last: nothing is recorded
    settings = ("--config", str(run_dir / "config.toml"), "--batches", str(recorded))
    command("replay", *settings, "--run-dir", str(tmp_path / "same"))
    changed = ("--loss.surrogate", "reinforce", "--loss.beta", "0.5")
    command("replay", *settings, "--run-dir", str(tmp_path / "other"), *changed)
    trained, same, other = (
        load_file(path / "model" / "model.safetensors") for path in (run_dir, tmp_path / "same", tmp_path / "other")
    )
    assert all(torch.equal(trained[name], same[name]) for name in trained)
    before = load_file(random_model / "model.safetensors")
    assert any(not torch.equal(trained[name], before[name]) for name in trained)
    names = ("loss", "grad_norm", "kl", "reward", "batch_ids", "staleness")
    trained_figures, replayed, changed_figures = (
        [[record[name] for name in names] for record in steps_of(path)]
        for path in (run_dir, tmp_path / "same", tmp_path / "other")
    )
    assert trained_figures == replayed and trained_figures[-1][0] != changed_figures[-1][0]
    assert any(not torch.equal(trained[name], other[name]) for name in trained)


DISTILL = (
    "--device", "cpu", "--threads", "1", "--preset", "distill", "--task", "jsonl", "--groups-per-step", "4",
    "--sampling.num-generations", "4", "--sampling.prompts-per-round", "4", "--sampling.max-completion-length", "8",
    "--evaluation.problems", "2", "--optimizer.learning-rate", "3e-3",
)  # fmt: skip


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """Another model of the same tokens, which is sure of what comes next: 5 nats a token from a random one."""
    model = make_model(7)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(6)
    save_model(model, make_tokenizer(), tmp_path / "teacher")
    return tmp_path / "teacher"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"What is {i}?"}) + "\n" for i in range(40)))
    return file


def run(model: Path, teacher: Path, prompts: Path, run_dir: Path, *options: str) -> Process:
    given = ("--model", str(model), "--teacher", str(teacher), "--data.path", str(prompts), "--run-dir", str(run_dir))
    return Process("policy_trainer", "train", *DISTILL, *given, *options, log=run_dir.parent / f"{run_dir.name}.log")


def test_bare_prompts_and_a_teacher_suffice(
    random_model: Path, teacher: Path, prompts: Path, tmp_path: Path, start: Any
) -> None:
    """Every group trains, the policy approaches the teacher, and no warning says that there is nothing to learn."""
    run_dir = tmp_path / "run"
    trainer = start(run(random_model, teacher, prompts, run_dir, "--max-steps", "24"))
    assert trainer.wait() == 0, trainer.output()
    steps = steps_of(run_dir)
    assert all(record["groups"] == 4 and record["groups_left_out"] == 0 for record in steps)
    assert steps[0]["kl_at_step_0"] > 0.01
    assert sum(record["teacher_kl"] for record in steps[-4:]) < 0.8 * sum(record["teacher_kl"] for record in steps[:4])
    output = trainer.output()
    assert "KL to the teacher before the first update" in output and "no rewards and no gold answers" in output
    assert "teach little or nothing" not in output and "most groups have equal rewards" not in output


def test_a_policy_that_reads_more_teaches_itself(random_model: Path, tmp_path: Path, start: Any) -> None:
    """The teacher begins as the initial policy and becomes a moving average of the policy; the KL penalty has the same
    model."""
    with (tmp_path / "prompts.jsonl").open("w") as file:
        for i in range(40):
            row = {"prompt": f"What is {i}?", "privileged_context": "0123456789"}
            file.write(json.dumps(row if i else {"prompt": "a row without it"}) + "\n")
    run_dir = tmp_path / "run"
    options = (
        "--model", str(random_model), "--data.path", str(tmp_path / "prompts.jsonl"), "--run-dir", str(run_dir),
        "--data.teacher-prompt-template", "{privileged_context} {prompt}", "--loss.beta", "0.01", "--max-steps", "6",
        "--max-lag", "0", "--reference.sync-steps", "2", "--reference.decay", "0.9",
    )  # fmt: skip
    trainer = start(Process("policy_trainer", "train", *DISTILL, *options, log=tmp_path / "log"))
    assert trainer.wait() == 0, trainer.output()
    steps = steps_of(run_dir)
    assert [record["groups"] for record in steps] == [4] * 6
    assert steps[0]["kl_at_step_0"] < 1e-6, "the reference reads the prompt"
    assert abs(steps[0]["teacher_kl"]) > 0.001, "the teacher reads another"
    assert steps[-1]["reference_version_max"] > steps[0]["reference_version_max"]


@pytest.mark.long
def test_a_teacher_beside_the_reference_survives_a_kill(
    random_model: Path, teacher: Path, prompts: Path, tmp_path: Path, start: Any
) -> None:
    run_dir = tmp_path / "run"
    options = ("--max-steps", "8", "--checkpoint.save-steps", "2", "--loss.beta", "0.1")
    trainer = start(run(random_model, teacher, prompts, run_dir, *options))
    until(lambda: len(steps_of(run_dir)) >= 3, "step 3", trainer)
    trainer.kill()
    resumed = start(Process("policy_trainer", "train", "--resume", "--run-dir", str(run_dir), log=tmp_path / "log"))
    assert resumed.wait() == 0, resumed.output()
    until(lambda: not processes_of(run_dir), "every process of the run to end")
    steps = steps_of(run_dir)
    assert [record["step"] for record in steps] == list(range(1, 9))
    assert steps[0]["kl_at_step_0"] < 1e-6, "the policy begins as the reference, and not as the teacher"
    assert all(math.isfinite(record["teacher_kl"]) and record["unusable_batches"] == 0 for record in steps)
