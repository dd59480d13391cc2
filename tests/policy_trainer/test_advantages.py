"""Group advantages against values worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.advantages import group_advantages, has_variance

NAN = math.nan


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # mean 1, unbiased std sqrt((1 + 0 + 1) / 2) = 1
        ([0.0, 1.0, 2.0], [-1 / 1.0001, 0.0, 1 / 1.0001]),
        # mean 0.25, std sqrt((3 * 0.0625 + 0.5625) / 3) = 0.5
        ([0.0, 0.0, 0.0, 1.0], [-0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, 0.75 / 0.5001]),
        # The same three as above: a NaN takes no part in mean and std, and gets 0.
        ([0.0, NAN, 1.0, 2.0, NAN], [-1 / 1.0001, 0.0, 0.0, 1 / 1.0001, 0.0]),
        # mean 3, std sqrt(2 * 4 / 1) = 2.8284271
        ([5.0, 1.0], [2 / (math.sqrt(8) + 1e-4), -2 / (math.sqrt(8) + 1e-4)]),
        ([1.0], [0.0]),
        ([NAN], [0.0]),
        ([NAN, NAN, NAN], [0.0, 0.0, 0.0]),
        ([2.0, NAN], [0.0, 0.0]),
    ],
)
def test_hand_computed(rewards: list[float], expected: list[float]) -> None:
    advantages = group_advantages(torch.tensor(rewards))
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx(expected, rel=1e-6, abs=0)


def test_eps_is_added_to_the_deviation() -> None:
    assert group_advantages(torch.tensor([0.0, 1.0, 2.0]), eps=1.0).tolist() == [-0.5, 0.0, 0.5]


def test_float64_stays() -> None:
    assert group_advantages(torch.tensor([0.0, 1.0], dtype=torch.float64)).dtype == torch.float64


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 17))
def test_equal_rewards_have_no_advantage_at_all(reward: float, size: int) -> None:
    """Exactly none: the mean of equal numbers need not be one of them, and its rounding must not be magnified."""
    rewards = torch.full((size,), reward)
    assert group_advantages(rewards).tolist() == [0.0] * size
    assert not has_variance(rewards)


@given(st.lists(st.floats(-8, 8, width=16) | st.just(NAN), min_size=1, max_size=12))
def test_whatever_the_rewards_the_advantages_are_finite_and_sum_to_nothing(rewards: list[float]) -> None:
    advantages = group_advantages(torch.tensor(rewards))
    assert advantages.isfinite().all()
    assert abs(float(advantages.sum())) < 1e-3
    assert all(advantage == 0 for reward, advantage in zip(rewards, advantages, strict=True) if math.isnan(reward))


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 1.0], True),
        ([1.0, 1.0], False),
        ([1.0], False),
        ([NAN], False),
        ([NAN, 1.0], False),
        ([NAN, 1.0, 1.0], False),
        ([NAN, 1.0, NAN, 0.0], True),
        ([0.1, 0.1, 0.1], False),
        ([1.0, 1.0000001], True),
    ],
)
def test_variance(rewards: list[float], expected: bool) -> None:
    assert has_variance(torch.tensor(rewards)).tolist() is expected


@given(st.lists(st.lists(st.floats(-8, 8, width=16) | st.just(NAN), min_size=1, max_size=9), min_size=1, max_size=5))
def test_groups_beside_one_another_do_not_touch(groups: list[list[float]]) -> None:
    """Padded with NaN to one length each has the advantages and the variance that it has alone."""
    width = max(map(len, groups))
    together = torch.tensor([group + [NAN] * (width - len(group)) for group in groups])
    for group, advantages, varies in zip(groups, group_advantages(together), has_variance(together), strict=True):
        alone = torch.tensor(group)
        # A sum over a longer row may be added up in another order.
        assert advantages[: len(group)].tolist() == pytest.approx(group_advantages(alone).tolist(), rel=1e-6)
        assert advantages[len(group) :].tolist() == [0.0] * (width - len(group))
        assert varies == has_variance(alone)


def test_a_spread_whose_square_float32_cannot_hold() -> None:
    advantages = group_advantages(torch.tensor([0.0, 1e30, 2e30]))
    assert advantages.tolist() == pytest.approx([-1.0, 0.0, 1.0])
