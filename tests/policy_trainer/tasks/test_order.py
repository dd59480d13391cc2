"""The order of problems."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.tasks.order import Shuffle


@given(st.integers(1, 50), st.integers(0, 2**63), st.integers(0, 10**6))
def test_each_pass_has_every_place_once(size: int, seed: int, number: int) -> None:
    shuffle = Shuffle(size, seed)
    assert sorted(shuffle.place(number * size + i) for i in range(size)) == list(range(size))


@given(st.integers(1, 20), st.lists(st.integers(0, 200), min_size=1))
def test_is_a_pure_function_of_the_index(size: int, indexes: list[int]) -> None:
    shuffle = Shuffle(size, 5)
    assert [shuffle.place(i) for i in indexes] == [Shuffle(size, 5).place(i) for i in indexes]


@pytest.mark.parametrize("index", [0, 1])
def test_of_one_place(index: int) -> None:
    assert Shuffle(1, 0).place(index) == 0
