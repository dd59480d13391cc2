"""What is answered for a sample whose reward fails."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from policy_trainer.data.problem import Problem
from policy_trainer.rewards import Sample
from policy_trainer.rewards.sandbox.answers import answers


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

    (answer,) = answers(greedy, [Sample(Problem("2"), "hoard")])
    assert "MemoryError: hoard" in answer["error"]
    assert [hoard() for hoard in hoards] == [None]
