"""What people type who come from TRL is answered with the setting that they mean."""

import dataclasses
import re
from pathlib import Path

import pytest

from policy_trainer.cli.settings import read_settings
from policy_trainer.cli.spellings import ABSENT, RENAMED
from policy_trainer.config import SftConfig, TrainConfig
from shared.settings.names import setting_names

PAGE = (Path(__file__).parents[3] / "docs" / "coming-from-trl.md").read_text()
TABLE = PAGE[PAGE.index("## Settings") : PAGE.index("| `loss_type` | `loss.surrogate` |")]
ROWS = [
    [re.findall(r"`([\w.]+)`", cell) for cell in row.split("|")[1:3]]
    for row in TABLE.splitlines()
    if row.startswith("| `")
]
OURS = {*setting_names(TrainConfig), *setting_names(SftConfig)}


def answer(capsys: pytest.CaptureFixture[str], option: str) -> str:
    with pytest.raises(SystemExit):
        read_settings(TrainConfig, ["--model", "m", option, "1"], "train")
    words = capsys.readouterr().err
    assert len(words.splitlines()) <= 3
    return words


def test_every_renamed_setting_is_one_of_ours() -> None:
    assert {ours for names in RENAMED.values() for ours in names} <= OURS
    assert not {*RENAMED, *ABSENT} & {name for name in setting_names(TrainConfig) if "." not in name}


@pytest.mark.parametrize(
    ("theirs", "ours"), [(name, row[1]) for row in ROWS for name in row[0] if name not in TrainConfig.model_fields]
)
def test_every_name_of_the_page_is_answered(capsys: pytest.CaptureFixture[str], theirs: str, ours: list[str]) -> None:
    words = answer(capsys, f"--{theirs}")
    assert any(f"--{name.replace('_', '-')}" in words for name in ours if name in OURS)


@pytest.mark.parametrize("name", ABSENT)
def test_what_there_is_not_is_said(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert ABSENT[name] in answer(capsys, f"--{name.replace('_', '-')}")


def test_names_are_trls_or_its_scripts() -> None:
    trl = pytest.importorskip("trl")
    known: set[str] = set()
    for config in (trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments, trl.SFTConfig):
        known |= {field.name for field in dataclasses.fields(config)}
    # Other programs' names for the same things.
    others = {"lr", "kl_coef", "kl_beta", "group_size", "max_new_tokens", "max_tokens", "reward_funcs", "torch_dtype"}
    assert {*RENAMED, *ABSENT} - known <= others | {"reward_model_name_or_path"}
