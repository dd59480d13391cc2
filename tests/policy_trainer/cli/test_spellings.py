"""What people type who come from TRL is answered with the setting that they mean, or with why there is none."""

import dataclasses
import inspect
from typing import Any

import pytest
import transformers
from packaging.version import Version

from policy_trainer import GRPO
from policy_trainer.cli.settings import read_settings
from policy_trainer.config import SftConfig, TrainConfig
from policy_trainer.config.names import ABSENT, HINTS, NO_SETTING, RENAMED, TRL
from shared.errors import UserError
from shared.settings.names import explain_unknown, setting_names
from shared.spelling import spell_option
from tools import trl_page

OURS = {*setting_names(TrainConfig), *setting_names(SftConfig)}
# Settings of other commands than train.
ELSEWHERE = {"batch_size", "max_length"}


def answer(name: str) -> str:
    return explain_unknown(name, setting_names(TrainConfig), HINTS, spell_option)


def test_each_name_stands_once() -> None:
    names = [name for section in TRL.values() for name in section]
    assert len(names) == len({*names})
    for section in TRL.values():
        for name, entry in section.items():
            ours, _, note = entry.partition(" | ")
            assert note if ours in NO_SETTING else {*ours.split()} <= OURS, name


def test_another_name_is_answered_with_ours() -> None:
    for name, ours in RENAMED.items():
        assert all(spell_option(setting) in answer(name) for setting in ours if setting not in ELSEWHERE), name


def test_what_there_is_not_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for name, reason in ABSENT.items():
        assert answer(name) == reason
    with pytest.raises(SystemExit):
        read_settings(TrainConfig, ["--model", "m", "--pad-to-multiple-of", "1"], "train")
    assert ABSENT["pad_to_multiple_of"] in capsys.readouterr().err


@pytest.mark.parametrize("name", ["args", "optimizers", "pad_to_multiple_of", "eval_delay"])
def test_from_python(name: str) -> None:
    settings: dict[str, Any] = {name: 1}
    with pytest.raises(UserError) as refused:
        GRPO(model="m", dataset=[{"prompt": "1+1=", "answer": "2"}], **settings)
    assert f"{name} is not a setting; {ABSENT[name]}" in str(refused.value)


def test_every_name_of_trl_has_an_entry() -> None:
    trl = pytest.importorskip("trl")
    known = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    known |= {*inspect.signature(trl.GRPOTrainer.__init__).parameters} - {"self"}
    entries = {name for section in TRL.values() for name in section}
    assert known <= entries
    for config in (trl.ModelConfig, trl.ScriptArguments):
        known |= {field.name for field in dataclasses.fields(config)}
    if Version(transformers.__version__) >= Version("5.23"):  # older ones have other training arguments
        assert entries - known == {"reward_model_name_or_path"}  # of TRL's scripts


def test_the_page_has_the_names() -> None:
    page = trl_page.PAGE.read_text()
    assert page == trl_page.written(page), "run: .venv/bin/python -m tools.trl_page"
