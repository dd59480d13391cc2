"""How groups are cut and joined."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.algorithms.objective.aggregation import Totals
from policy_trainer.algorithms.objective.group import Group
from policy_trainer.config import LossConfig
from policy_trainer.learner.micro_batches import cut, join, split_evenly, totals
from tests.device import DEVICE
from tests.policy_trainer.learner.steps import ready_groups

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("sizes", "limit", "parts"),
    [([], 5, []), ([9], 5, [1]), ([2, 3, 1], 5, [2, 1]), ([2, 9, 1], 5, [1, 1, 1]), ([1, 1, 1], 9, [3])],
)
def test_cut(sizes: list[int], limit: int, parts: list[int]) -> None:
    assert [len(sizes[part]) for part in cut(sizes, limit)] == parts


@given(st.integers(0, 50), st.integers(1, 12))
def test_an_even_split_is_consecutive_and_as_equal_as_can_be(count: int, parts: int) -> None:
    numbers = list(range(count))
    got = [numbers[part] for part in split_evenly(count, parts)]
    assert [number for part in got for number in part] == numbers
    assert len(got) == min(count, parts)
    assert not got or max(map(len, got)) - min(map(len, got)) <= 1


@pytest.fixture
def groups(make_scored: Make) -> list[Group]:
    batches = [
        make_scored([3], [[4, 5], [6]], [0.0, 1.0], old_logps=[-1, -2, -3], ref_logps=[-4, -5, -6], temperature=0.5),
        make_scored([7, 8], [[9], [10, 11]], [1.0, float("nan")], loss_mask=[True, True, True]),
    ]
    return ready_groups(batches, LossConfig(drop_zero_variance=False))


def test_groups_are_joined(groups: list[Group]) -> None:
    got = join(groups, DEVICE)
    assert got.sequence_ids.tolist() == [0, 0, 1, 2, 3, 3]
    assert got.mask.tolist() == [True] * 4 + [False] * 2
    assert got.old_logps is not None and got.old_logps.tolist() == [-1, -2, -3, -1, -1, -1]
    assert got.ref_logps is not None and got.ref_logps.tolist() == [-4, -5, -6, -1, -1, -1]
    assert got.advantages.dtype == torch.float32 and len(got.advantages) == 6


def test_what_one_group_lacks_none_has(groups: list[Group], make_scored: Make) -> None:
    loss = LossConfig(beta=0, old_logps="current", drop_zero_variance=False)
    unscored = make_scored([3], [[4]], [1.0]).without_scores()
    object.__setattr__(unscored, "sampler_logps", None)
    more = ready_groups([unscored], loss)
    got = join([*groups, *more], DEVICE)
    assert got.old_logps is None and got.ref_logps is None
    assert got.sampler_logps is not None
    assert got.sampler_logps.isnan().tolist() == [False] * 6 + [True], "each group has its own, or NaN"


def test_totals_count_what_trains(groups: list[Group]) -> None:
    assert totals(groups, 7) == Totals(completions=3, tokens=4, max_completion_length=7, explored=4)


def test_tokens_of_high_entropy_are_joined_and_counted(groups: list[Group]) -> None:
    masks = [np.array([True, False, True]), np.array([True, True, True])]
    marked = [replace(group, high_entropy=mask) for group, mask in zip(groups, masks, strict=True)]
    assert join(marked, DEVICE).explored.tolist() == [True, False, True, True, False, False]
    assert (totals(marked, 7).tokens, totals(marked, 7).explored) == (4, 3)
