"""docs/reward-models.md: its lines are pairs, and its commands parse."""

from pathlib import Path

import pytest

from policy_trainer.cli.settings import FileSchema
from policy_trainer.config import EvalConfig, RewardTrainingConfig, SftConfig, TrainConfig
from policy_trainer.config.supervised import PairsConfig
from policy_trainer.reward_model.preferences import read_preferences
from shared.settings import load_settings
from tests.docs.pages import ROOT, Command, commands_of, texts

PAGE = (ROOT / "docs" / "reward-models.md").read_text(encoding="utf-8")
CLASSES = {"sft": SftConfig, "reward-model": RewardTrainingConfig, "train": TrainConfig, "eval": EvalConfig}
COMMANDS = [one for one in commands_of(ROOT / "docs" / "reward-models.md") if one.words[0] == "policy-trainer"]


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_commands(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    _, verb, *arguments = command.words
    load_settings(CLASSES[verb], arguments, prog="policy-trainer", schema=FileSchema)


def test_lines(tmp_path: Path) -> None:
    (lines,) = texts("reward-models.md", "json")
    (tmp_path / "pairs.jsonl").write_text(lines)
    found, _ = read_preferences(PairsConfig(path=tmp_path / "pairs.jsonl", eval_path=tmp_path / "pairs.jsonl"), print)
    assert [one.chosen.completion for one in found] == ["2+3=5", "5", "5", "2+3=5"]
    assert [one.margin for one in found] == [0, 0, 0, 0.5]


def test_the_limit_is_the_default_of_both() -> None:
    limit = RewardTrainingConfig.model_fields["max_length"].default
    assert f"`--max-length` ({limit})" in PAGE and limit == TrainConfig(model="m").judging.model.max_length
