"""The game of docs/tools.md, walked as it stands: GRPO makes a player who guesses at random need fewer guesses."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.harness.runs import steps_of
from tests.integration.roads import walk

PAGE = ROOT / "docs" / "tools.md"


def mean(steps: Sequence[dict[str, Any]], name: str) -> float:
    return fmean(step[name] for step in steps)


@pytest.mark.long
def test_the_game_is_learnt(tmp_path: Path) -> None:
    walk(PAGE, tmp_path)

    steps = steps_of(tmp_path / "runs/game/grpo")
    first, after = steps[:10], steps[-10:]  # 1,280 games each
    assert mean(after, "reward") > mean(first, "reward") + 0.12
    assert mean(after, "rollouts/finished") > mean(first, "rollouts/finished") + 0.15
    assert mean(after, "tools/call_frequency/guess") < mean(first, "tools/call_frequency/guess") - 0.3
