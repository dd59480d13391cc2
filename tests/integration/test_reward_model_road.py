"""docs/reward-models.md walked as it stands: The true score rises, which trains nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.integration.roads import walk

PAGE = ROOT / "docs" / "reward-models.md"


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == "evaluation"]


@pytest.mark.long
def test_the_road(tmp_path: Path) -> None:
    walk(PAGE, tmp_path)

    before, *_, after = evaluations(tmp_path / "runs/taste/judge")
    assert after["low"] > 0.8 > before["low"]
    before, *_, after = evaluations(tmp_path / "runs/taste/grpo")
    assert after["rewards"]["model"] > before["rewards"]["model"] + 1
    assert before["rewards"]["taste:shows_work"] < 0.3 < 0.8 < after["rewards"]["taste:shows_work"]
