"""docs/coming-from-trl.md names settings that exist, on both sides."""

import dataclasses
import re
from pathlib import Path

import pytest

from tests.policy_trainer.proofs.settings import choices, setting_exists

PAGE = (Path(__file__).parents[3] / "docs" / "coming-from-trl.md").read_text()
SETTINGS = PAGE[PAGE.index("## Settings") : PAGE.index("| `loss_type` | `loss.surrogate` |")]
ROWS = [
    [re.findall(r"`([\w.]+)`", cell) for cell in row.split("|")[1:3]]
    for row in SETTINGS.splitlines()
    if row.startswith("| `")
]


@pytest.mark.parametrize("name", [name for _, ours in ROWS for name in ours])
def test_our_names_are_settings(name: str) -> None:
    assert setting_exists(name)


def test_their_names_are_settings() -> None:
    trl = pytest.importorskip("trl")
    known = {field.name for config in (trl.GRPOConfig, trl.ModelConfig) for field in dataclasses.fields(config)}
    assert len(ROWS) > 30
    assert {name for theirs, _ in ROWS for name in theirs} <= known


def test_every_loss_type_is_a_choice_of_ours() -> None:
    table = re.findall(r"^\| (\w+) \| `(\w+)` \| `(\w+)` \|", PAGE, re.MULTILINE)
    assert len(table) == 8
    for _, surrogate, aggregation in table:
        assert surrogate in choices("surrogate") and aggregation in choices("aggregation")
