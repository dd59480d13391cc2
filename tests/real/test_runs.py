"""Pretrained models through a user's commands: doctor, a run that is killed and resumed on a server that the user has
started, export, adapters, adapters over 4 bits, gradient checkpointing, and a held-out reward that rises."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.harness.processes import Process, processes_of, until
from tests.harness.runs import assert_trained_exactly_once, steps_of
from tests.harness.server import Server

pytestmark = pytest.mark.long
Start = Callable[[Any], Any]
QUESTION = "Answer with a number only: what is {} plus {}?"
# Ten steps of 16 completions, which end soon.
SHORT = (
    "--device", "cpu", "--data.answer-in", "last_number", "--data.answer-rule", "number", "--rewards", "accuracy",
    "--groups-per-step", "4", "--sampling.num-generations", "4", "--sampling.max-completion-length", "12",
    "--sampling.prompts-per-round", "8", "--max-steps", "10", "--checkpoint.save-steps", "4",
    "--evaluation.problems", "0", "--no-loss.drop-zero-variance", "--optimizer.learning-rate", "5e-6",
)  # fmt: skip
MINUTES = 60
HEAD = "lm_head.weight"


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sums") / "sums.jsonl"
    pairs = [(a, b) for a in range(2, 30) for b in range(2, 10)]
    rows = [{"prompt": QUESTION.format(a, b), "answer": str(a + b)} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(command: str, model: Path, sums: Path, *options: str, log: Path) -> Process:
    return Process("policy_trainer", command, "--model", str(model), "--data.path", str(sums), *options, log=log)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_doctor_finds_nothing_wrong(
    name: str, sums: Path, tmp_path: Path, start: Start, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    doctor = start(run("doctor", model, sums, *SHORT, "--run-dir", str(tmp_path / "run"), log=tmp_path / "log"))
    assert doctor.wait(10 * MINUTES) == 0, doctor.output()
    assert "the run may begin" in doctor.output()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_killed_run_resumes(dtype: str, smollm2: Path, sums: Path, tmp_path: Path, start: Start) -> None:
    """Its reference server is a process that the user has started, in float32."""
    server, place = start(Server(smollm2, tmp_path)).until_ready(), tmp_path / "run"
    options = (*SHORT, "--dtype", dtype, "--server", server.url, "--run-dir", str(place))
    trainer = start(run("train", smollm2, sums, *options, log=tmp_path / "first.log"))
    until((place / "checkpoints" / "step-00000004").exists, "the first checkpoint", trainer, seconds=8 * MINUTES)
    trainer.kill()
    until(lambda: not processes_of(place), "its worker to end", trainer)
    trainer = start(run("train", smollm2, sums, *options, "--resume", log=tmp_path / "second.log"))
    assert trainer.wait(8 * MINUTES) == 0, trainer.output()

    steps = steps_of(place)
    assert [record["step"] for record in steps] == list(range(1, 11))
    # One reference in float32, a policy in either dtype: rounding, and nothing else, lies between them.
    assert steps[0]["kl_at_step_0"] < (1e-6 if dtype == "float32" else 1e-2)
    assert all(0.5 < record["ratio_mean"] < 2 for record in steps)
    assert_trained_exactly_once(server, place)

    states = [AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (smollm2, place / "model")]
    assert states[0].keys() == states[1].keys() and not torch.equal(states[0][HEAD], states[1][HEAD])
    assert AutoTokenizer.from_pretrained(place / "model").chat_template


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("smollm2", ("--lora.rank", "8", "--lora.load-in-4bit")),
        ("gemma3", ("--lora.rank", "8", "--reference.source", "adapter-off")),
        ("gemma3", ("--gradient-checkpointing", "--dtype", "bfloat16")),
    ],
)
def test_other_ways_to_train(
    name: str, options: tuple[str, ...], sums: Path, tmp_path: Path, start: Start, request: pytest.FixtureRequest
) -> None:
    model, place = request.getfixturevalue(name), tmp_path / "run"
    # A base model solves nothing and does not end, but its first sentences have different lengths.
    few = (
        *SHORT, *options, "--rewards", "length", "--sampling.stop", ".", "\n", "--max-steps", "3",
        "--run-dir", str(place),
    )  # fmt: skip
    trainer = start(run("train", model, sums, *few, log=tmp_path / "log"))
    assert trainer.wait(8 * MINUTES) == 0, trainer.output()
    steps = steps_of(place)
    assert len(steps) == 3 and steps[0]["kl"] < 1e-2
    assert any(record["grad_norm"] > 0 for record in steps)
    if "--lora.rank" in options:
        checkpoint, out = place / "checkpoints" / "step-00000003", tmp_path / "whole"
        export = ("policy_trainer", "export", "--checkpoint", str(checkpoint), "--output", str(out))
        exported = start(Process(*export, log=tmp_path / "export.log"))
        assert exported.wait(2 * MINUTES) == 0, exported.output()
        assert AutoModelForCausalLM.from_pretrained(out).num_parameters() > 1e8


def test_the_held_out_reward_rises(smollm2: Path, sums: Path, tmp_path: Path, start: Start) -> None:
    place = tmp_path / "run"
    options = (
        "--loss.beta", "0", "--groups-per-step", "8", "--sampling.num-generations", "8", "--loss.drop-zero-variance",
        "--optimizer.learning-rate", "1e-5", "--max-steps", "40", "--evaluation.problems", "25",
    )  # fmt: skip
    trainer = start(run("train", smollm2, sums, *SHORT, *options, "--run-dir", str(place), log=tmp_path / "log"))
    assert trainer.wait(12 * MINUTES) == 0, trainer.output()
    records = map(json.loads, (place / "metrics.jsonl").read_text().splitlines())
    first, last = [record["reward"] for record in records if record["kind"] == "evaluation"]
    assert last > first + 0.1
