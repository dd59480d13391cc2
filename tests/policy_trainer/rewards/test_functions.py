"""A user's own reward is called as its parameters ask, and what it returns is checked."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from policy_trainer.data.problem import Problem
from policy_trainer.rewards import Sample
from policy_trainer.rewards.functions import judge, reward_function


@pytest.mark.parametrize(("result", "told"), [(None, "got NoneType"), ("good", "got str"), ([[1.0]], "got list")])
def test_what_is_no_list_of_numbers_is_named(result: object, told: str) -> None:
    def broken(completions: list[str]) -> object:
        return result

    reward = reward_function("mine:broken", broken)
    with pytest.raises(ValueError, match=told):
        reward.outcomes([Sample(Problem("1", prompt="x"), "y", 1, True)])


class Hoard:
    pass


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_a_failed_reward_s_memory_is_free_when_it_is_answered(no_collection: None) -> None:
    """The next completion is judged in the same process, under the same limit."""
    hoards: list[weakref.ref[Hoard]] = []

    def greedy(sample: Sample) -> float:
        hoard = Hoard()
        hoards.append(weakref.ref(hoard))
        raise MemoryError(sample.completion)

    (answer,) = judge(greedy, [Sample(Problem("2"), "hoard")])
    assert "MemoryError: hoard" in answer["error"]
    assert [hoard() for hoard in hoards] == [None]
