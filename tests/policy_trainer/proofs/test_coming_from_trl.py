"""docs/coming-from-trl.md: each loss_type of TRL by our names. Settings are tested with the table in trl.toml."""

import re
from pathlib import Path

from tests.policy_trainer.proofs.settings import choices

PAGE = (Path(__file__).parents[3] / "docs" / "coming-from-trl.md").read_text()


def test_every_loss_type_is_a_choice_of_ours() -> None:
    table = re.findall(r"^\| (\w+) \| `(\w+)` \| `(\w+)` \|", PAGE, re.MULTILINE)
    assert len(table) == 8
    for _, surrogate, aggregation in table:
        assert surrogate in choices("surrogate") and aggregation in choices("aggregation")
