"""docs/sft.md: its lines are demonstrations, its commands parse, and its code writes the files that they use."""

from pathlib import Path

import pytest

from policy_trainer.cli.settings import FileSchema
from policy_trainer.config import EvalConfig, SftConfig, TrainConfig
from policy_trainer.sft.demonstrations import read_demonstrations
from shared.settings import load_settings
from tests.docs.pages import ROOT, Command, commands_of, texts

CLASSES = {"sft": SftConfig, "eval": EvalConfig, "train": TrainConfig}
COMMANDS = commands_of(ROOT / "docs" / "sft.md")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.words[0] == "policy-trainer"], ids=str)
def test_commands(command: Command) -> None:
    _, verb, *arguments = command.words
    load_settings(CLASSES[verb], arguments, prog="policy-trainer", schema=FileSchema)


def test_lines(tmp_path: Path) -> None:
    (lines,) = texts("sft.md", "json")
    (tmp_path / "lines.jsonl").write_text(lines)
    found = read_demonstrations(tmp_path / "lines.jsonl", "data.path")
    assert [one.completion for one in found] == ["7", "<think>2+3=5</think><answer>5</answer>", "5"]


def test_the_files_of_the_example(tmp_path: Path) -> None:
    exec(texts("sft.md", "python")[0], {})
    assert (tmp_path / "runs/sums/random/model.safetensors").exists()
    assert len(read_demonstrations(tmp_path / "runs/sums/worked.jsonl", "data.path")) == 6000
