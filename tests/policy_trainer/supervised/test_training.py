"""Rows in batches: every row once in an epoch, in an order of its own; and every tenth one held out."""

import pytest

from policy_trainer.supervised.training import RowSet, every_tenth
from shared.errors import UserError


def order(data: RowSet[int]) -> list[list[int]]:
    return [data.batch(step) for step in range(data.steps)]


def test_each_epoch_has_every_row_once_in_its_own_order() -> None:
    batches = order(RowSet(range(10), [0], epochs=3, batch_size=4, seed=0))
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4, 4, 4, 2]
    drawn = [row for batch in batches for row in batch]
    passes = [drawn[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(single) == list(range(10)) for single in passes)
    assert passes[0] != passes[1] != passes[2]


def test_the_order_is_a_function_of_seed_and_step() -> None:
    first, again, other = (RowSet(range(10), [0], epochs=2, batch_size=3, seed=seed) for seed in (0, 0, 1))
    expected = order(first)
    assert [again.batch(step) for step in (4, 1)] == [expected[4], expected[1]]
    assert order(other) != expected


def test_too_few_rows() -> None:
    with pytest.raises(UserError, match=r"data\.path: x leaves nothing to train on: one of every 10 rows"):
        every_tenth([1], str, "data.path: x", print)
