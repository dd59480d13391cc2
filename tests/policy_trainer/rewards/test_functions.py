"""A reward's result is checked, and its memory is freed."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from policy_trainer.data.problem import Problem
from policy_trainer.rewards import Sample
from policy_trainer.rewards.functions import RewardFunction, reward_function


@pytest.mark.parametrize(("result", "reason"), [(None, "got NoneType"), ("good", "got str"), ([[1.0]], "got list")])
def test_a_wrong_result_is_an_error(result: object, reason: str) -> None:
    def broken(completions: list[str]) -> object:
        return result

    reward = reward_function("mine:broken", broken)
    (answer,) = reward.answers([Sample(Problem("1", prompt="x"), "y", 1, True)])
    assert "ValueError" in answer["error"] and reason in answer["error"]


class Hoard:
    pass


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_a_failed_reward_leaves_no_memory(no_collection: None) -> None:
    """The next completion is judged in the same process, under the same limit."""
    hoards: list[weakref.ref[Hoard]] = []

    def greedy(sample: Sample) -> float:
        hoard = Hoard()
        hoards.append(weakref.ref(hoard))
        raise MemoryError(sample.completion)

    (answer,) = RewardFunction("greedy", greedy, "sample").answers([Sample(Problem("2"), "hoard")])
    assert "MemoryError: hoard" in answer["error"]
    assert [hoard() for hoard in hoards] == [None]
