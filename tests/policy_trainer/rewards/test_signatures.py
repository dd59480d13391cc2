"""A user's own reward is called as its parameters ask, and what it returns is checked."""

import pytest

from policy_trainer.data.problem import Problem
from policy_trainer.rewards import Sample
from policy_trainer.rewards.signatures import ManyAtOnce, own_reward


@pytest.mark.parametrize(("result", "told"), [(None, "got NoneType"), ("good", "got str"), ([[1.0]], "got list")])
def test_what_is_no_list_of_numbers_is_named(result: object, told: str) -> None:
    def judge(completions: list[str]) -> object:
        return result

    reward = own_reward("mine:judge", judge)
    assert isinstance(reward, ManyAtOnce)
    with pytest.raises(ValueError, match=told):
        reward.outcomes([Sample(Problem("1", prompt="x"), "y", 1, True)])
