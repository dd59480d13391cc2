"""No reward: 0 whatever the completion is, also where nothing could be judged."""

import pytest

from policy_trainer.data.problem import Problem
from policy_trainer.rewards import Sample
from policy_trainer.rewards.registry import RULES


@pytest.mark.parametrize("completion", ["", "<answer>4</answer>", "\0"])
def test_it_is_0(completion: str) -> None:
    rule = RULES["none"]
    assert callable(rule) and rule(Sample(Problem(""), completion, len(completion))) == 0.0
