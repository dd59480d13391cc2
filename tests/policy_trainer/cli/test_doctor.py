"""`policy-trainer doctor --plan`: a table and a status, from nothing but a model's configuration."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from policy_trainer.cli.doctor import run

LENGTHS = ("--sampling.max-completion-length", "64", "--data.max-prompt-length", "32")


@pytest.fixture
def model(make_tiny: Callable[..., PreTrainedModel], tmp_path: Path) -> str:
    make_tiny().config.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(("gib", "status"), [("1", 0), ("0.001", 1)])
def test_says_whether_it_fits(model: str, gib: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--plan", "--model", model, *LENGTHS, "--gpu-memory-gib", gib]) == status
    text = capsys.readouterr().out
    for row in ("trainer", "reference server", "worker", "main memory", "FLOP a step", "weights a round"):
        assert row in text
    assert ("does not fit: cuda:0 has" in text) is bool(status)
    assert "Python and PyTorch" not in text


def test_names_what_a_process_on_a_cpu_holds_besides(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--plan", "--model", model, *LENGTHS, "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert output.count("Python and PyTorch 0.4") == 3 and "freed memory" in output


def test_of_other_machines_needs_the_option(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["--model", model, "--ranks", "4"])
    assert "ranks: it is for the memory plan of other machines: add `--plan`" in capsys.readouterr().err


def test_as_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--plan", "--json", "--model", model, *LENGTHS, "--gpu-memory-gib", "0.001"]) == 1
    plan = json.loads(capsys.readouterr().out)
    assert plan["needs"][0]["process"] == "trainer" and plan["short"][0]["memory"] == "cuda:0"
