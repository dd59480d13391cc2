"""`policy-trainer train --teacher`: bare prompts and a teacher, alone or beside the reference; a kill, refusals."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from policy_trainer.demo.base_model import make_model, make_tokenizer
from shared.models import save_model
from tests.integration.processes import Process, processes_of, steps_of, until

QUICK = (
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
    return Process("policy_trainer", "train", *QUICK, *given, *options, log=run_dir.parent / f"{run_dir.name}.log")


def test_bare_prompts_and_a_teacher_suffice(
    random_model: Path, teacher: Path, prompts: Path, tmp_path: Path, start: Any
) -> None:
    """Every group trains, the policy comes nearer, and nobody says that there is nothing to learn."""
    run_dir = tmp_path / "run"
    trainer = start(run(random_model, teacher, prompts, run_dir, "--max-steps", "24"))
    assert trainer.wait() == 0, trainer.output()
    steps = steps_of(run_dir)
    assert all(record["groups"] == 4 and record["groups_left_out"] == 0 for record in steps)
    assert steps[0]["kl_at_step_0"] > 0.01
    assert sum(record["teacher_kl"] for record in steps[-4:]) < 0.8 * sum(record["teacher_kl"] for record in steps[:4])
    said = trainer.output()
    assert "KL to the teacher before the first update" in said and "no rewards and no gold answers" in said
    assert "teach little or nothing" not in said and "most groups have equal rewards" not in said


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


def test_another_vocabulary_is_refused(random_model: Path, prompts: Path, tmp_path: Path, start: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<other>"])
    save_model(make_model(7), tokenizer, tmp_path / "foreign")
    for number, beta in enumerate(("0", "0.1")):
        trainer = start(
            run(random_model, tmp_path / "foreign", prompts, tmp_path / f"run-{number}", "--loss.beta", beta)
        )
        assert trainer.wait() != 0
        assert "the tokenizer of" in trainer.output() and "Traceback" not in trainer.output()


@pytest.mark.long
def test_a_dry_run(random_model: Path, teacher: Path, prompts: Path, tmp_path: Path, start: Any) -> None:
    trainer = start(run(random_model, teacher, prompts, tmp_path / "run", "--dry-run", "--loss.beta", "0.1"))
    assert trainer.wait() == 0, trainer.output()
    assert "the dry run went well" in trainer.output()
