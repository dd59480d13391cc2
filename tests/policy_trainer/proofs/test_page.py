"""docs/mathematics.md names every setting of the loss, every choice, and nothing that does not exist.

docs/coming-from-trl.md names existing choices for TRL's loss types.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from policy_trainer.config import LossConfig
from tests.policy_trainer.proofs.settings import choices, setting_exists

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "mathematics.md").read_text()
COMING_FROM_TRL = (DOCS / "coming-from-trl.md").read_text()
OURS = PAGE[: PAGE.index("## Differences from TRL")]
CODE = re.findall(r"`([^`]+)`", OURS)
SETTINGS: dict[str, Any] = LossConfig.model_fields


def test_every_setting_and_every_choice_is_there() -> None:
    named = set(re.findall(r"[\w.+]+", " ".join(CODE)))
    assert set(SETTINGS) <= named
    names = {str(choice) for name in SETTINGS for choice in choices(name) if isinstance(choice, str)}
    assert len(names) > 25 and names <= named


@pytest.mark.parametrize(("name", "value"), re.findall(r"`([\w.]+) = ([\w.+-]+)`", OURS))
def test_what_it_sets_can_be_set(name: str, value: str) -> None:
    if name in SETTINGS:
        TypeAdapter(SETTINGS[name].rebuild_annotation()).validate_python(value)
    else:
        assert setting_exists(name)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\w+\.\w+", " ".join(re.findall(r"`([a-z_.]+)`", OURS))))))
def test_other_settings_exist(name: str) -> None:
    assert setting_exists(name)


def test_every_loss_type_is_a_choice_of_ours() -> None:
    table = re.findall(r"^\| (\w+) \| `(\w+)` \| `(\w+)` \|", COMING_FROM_TRL, re.MULTILINE)
    assert len(table) == 8
    for _, surrogate, aggregation in table:
        assert surrogate in choices("surrogate") and aggregation in choices("aggregation")
