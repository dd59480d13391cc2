"""Rollouts of several turns with LoRA, weights from the server, a teacher, and replay."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from policy_trainer.reporting.samples import read_samples
from shared import wire
from shared.models import use_threads
from tests.harness.processes import Process
from tests.harness.runs import steps_of
from tests.policy_trainer.rollout.environments.calling_model import make_calling_model

COUNTER = "tests.policy_trainer.rollout.environments.my_tools:Counter"
QUICK = ("--max-steps", "2", "--groups-per-step", "2", "--sampling.num-generations", "4", "--evaluation.problems", "4")


def rollouts() -> Iterator[Sequence[str]]:
    chance = random.Random(0)
    while True:
        calls = [f'<call>increment{{"step": {chance.randint(1, 9)}}}</call>' for _ in range(chance.randint(0, 2))]
        yield [*calls, str(chance.randint(2, 9))]


@pytest.fixture
def calling_model(tmp_path: Path) -> Path:
    use_threads(1)
    model, tokenizer = make_calling_model(rollouts(), "7", 60)
    model.save_pretrained(tmp_path / "calling")
    tokenizer.save_pretrained(tmp_path / "calling")
    return tmp_path / "calling"


def test_adapters_weights_from_the_server_a_teacher_and_replay(calling_model: Path, tmp_path: Path, start: Any) -> None:
    run_dir, recorded = tmp_path / "run", tmp_path / "recorded"

    def command(name: str, *options: str) -> None:
        process = start(Process("policy_trainer", name, *options, log=tmp_path / "log"))
        assert process.wait() == 0, process.output()

    model = ("--model", str(calling_model), "--environment", COUNTER, "--sampling.max-completion-length", "120")
    teacher = ("--teacher", str(calling_model), "--loss.distillation-coef", "0.1", "--loss.beta", "0")
    seen = ("--samples.every", "1", "--samples.prompts", "2")  # all groups
    ways = ("--lora.rank", "4", "--weights", "server", *teacher, *seen, "--record", str(recorded), "--seed", "5")
    command("train", *model, *QUICK, *ways, "--run-dir", str(run_dir))
    command(
        "replay", "--config", str(run_dir / "config.toml"), "--batches", str(recorded), "--run-dir", str(tmp_path / "2")
    )
    names = ("loss", "grad_norm", "reward", "teacher_kl", "tools/call_frequency")
    trained, replayed = (
        [[record[name] for name in names] for record in steps_of(path)] for path in (run_dir, tmp_path / "2")
    )
    assert trained == replayed and any(record[-1] > 0 for record in trained)
    batches: list[Any] = [wire.decode(path.read_bytes()) for path in recorded.rglob("*.safetensors")]
    assert batches and not all(batch.loss_mask.all() for batch in batches)
    turns = [item.turns for group in read_samples(run_dir / "samples.jsonl") for item in group.completions]
    assert any(turn.calls for each in turns for turn in each)


@pytest.mark.long
def test_the_doctor_rolls_out_with_the_environment(calling_model: Path, tmp_path: Path, start: Any) -> None:
    model = ("--model", str(calling_model), "--environment", COUNTER, "--sampling.max-completion-length", "120")
    process = start(Process("policy_trainer", "doctor", *model, *QUICK, log=tmp_path / "log"))
    assert process.wait() == 0, process.output()
    assert "the run may begin" in process.output() and "made-up samples have no environment" in process.output()
