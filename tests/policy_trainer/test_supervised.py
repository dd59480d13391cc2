"""Rows in batches: every row once in an epoch, in an order of its own; and every tenth one held out."""

import pytest

from policy_trainer.supervised import RowSet, every_tenth
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


def test_every_tenth_row_is_held_out_with_all_that_share_its_key() -> None:
    notes: list[str] = []
    train, held_back = every_tenth(range(50), lambda row: str(row % 25), "data.path: x", notes.append)
    assert held_back == [0, 10, 20, 30, 40]
    assert train == [row for row in range(50) if row % 25 not in (0, 10, 20, 5, 15)]
    assert len(train) == 40
    assert [note.partition(",")[0] for note in notes] == ["data.path: x has 50 rows: 5 of them are left out"]
    every_tenth(range(50), str, "data.path: x", notes.append)
    assert len(notes) == 1


def test_too_few_rows() -> None:
    with pytest.raises(UserError, match=r"data\.path: x leaves nothing to train on: one of every 10 rows"):
        every_tenth([1], str, "data.path: x", print)
