"""Advantages against values worked out by hand."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.config import LossConfig
from policy_trainer.objective.advantages import ADVANTAGES, advantages
from policy_trainer.objective.group import Group, RewardParts
from shared.batch import StepRewards
from tests.policy_trainer.groups import make_group

NAN = math.nan
# Of whole completions: the same for every token.
OUTCOMES = ["outcome", "dr_grpo", "rloo"]


def of_groups(groups: Sequence[Sequence[float]], **settings: Any) -> list[list[float]]:
    """Advantages of the completions of groups, each of one token."""
    made = [make_group(np.array(rewards, np.float32)) for rewards in groups]
    return [values.tolist() for values in advantages(made, LossConfig.model_validate(settings))]


def of_group(*rewards: float, **settings: Any) -> list[float]:
    return of_groups([rewards], **settings)[0]


def near(values: Sequence[float]) -> Any:
    return pytest.approx(values, rel=1e-6, abs=1e-7)


class TestOutcome:
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
    def test_hand_computed(self, rewards: list[float], expected: list[float]) -> None:
        assert of_group(*rewards) == pytest.approx(expected, rel=1e-6, abs=0)

    def test_population_std(self) -> None:
        """sqrt((1 + 0 + 1) / 3)"""
        std = math.sqrt(2 / 3) + 1e-4
        assert of_group(0.0, 1.0, 2.0, advantage_std="population") == near([-1 / std, 0, 1 / std])
        assert of_group(1.0, advantage_std="population") == [0.0]

    def test_eps_is_added_to_the_deviation(self) -> None:
        assert of_group(0.0, 1.0, 2.0, advantage_eps=1.0) == [-0.5, 0.0, 0.5]

    def test_unscaled(self) -> None:
        assert of_group(0.0, 1.0, 5.0, NAN, scale_rewards="none") == [-2.0, -1.0, 3.0, 0.0]

    def test_scaled_by_the_rewards_of_the_whole_step(self) -> None:
        """Rewards 0, 2, 1, 1, 6 and a NaN: mean 2, unbiased variance (4 + 0 + 1 + 1 + 16) / 4."""
        std = math.sqrt(5.5) + 1e-4
        got = of_groups([[0.0, 2.0], [1.0, NAN, 1.0], [6.0]], scale_rewards="batch")
        assert got[0] == near([-1 / std, 1 / std])
        assert got[1:] == [[0.0, 0.0, 0.0], [0.0]]

    def test_a_spread_whose_square_float32_cannot_hold(self) -> None:
        assert of_group(0.0, 1e30, 2e30) == near([-1.0, 0.0, 1.0])


class TestDrGrpo:
    def test_hand_computed(self) -> None:
        assert of_groups([[0.0, 1.0, 5.0, NAN], [3.0, 4.0]], advantage="dr_grpo") == [[-2, -1, 3, 0], [-0.5, 0.5]]


class TestRloo:
    def test_hand_computed(self) -> None:
        """0 - 3, 1 - 2.5, 5 - 0.5; of one that is alone there are no others."""
        assert of_group(0.0, 1.0, 5.0, advantage="rloo") == near([-3.0, -1.5, 4.5])
        assert of_group(0.0, NAN, 1.0, 5.0, advantage="rloo") == near([-3.0, 0.0, -1.5, 4.5])
        assert of_groups([[3.0], [NAN, 2.0], [2.0, 2.0]], advantage="rloo") == [[0], [0, 0], [0, 0]]

    def test_scaled_by_the_whole_step(self) -> None:
        std = math.sqrt((4 + 1 + 9) / 2) + 1e-4
        assert of_group(0.0, 1.0, 5.0, advantage="rloo", scale_rewards="batch") == near(
            [-3 / std, -1.5 / std, 4.5 / std]
        )


class TestProcess:
    @staticmethod
    def with_steps(
        rewards: list[float], lengths: list[int], steps: list[list[tuple[float, int]]], **extra: Any
    ) -> Group:
        return make_group(
            rewards=np.array(rewards, np.float32),
            lengths=np.array(lengths),
            steps=StepRewards(
                rewards=np.array([reward for row in steps for reward, _ in row], np.float32),
                ends=np.array([end for row in steps for _, end in row], np.int64),
                counts=np.array([len(row) for row in steps]),
            ),
            **extra,
        )

    def test_hand_computed(self) -> None:
        """Rewards 0 and 2, then 1, then none: mean 1, std 1; tokens behind the last step have nothing to come."""
        group = self.with_steps([0, 0, 0], [4, 2, 1], [[(0.0, 1), (2.0, 2)], [(1.0, 1)], []])
        (got,) = advantages([group], LossConfig(advantage="process"))
        assert got.dtype == np.float32
        assert got.tolist() == near([0, 0, 1 / 1.0001, 0, 0, 0, 0])

    def test_later_steps_add_up(self) -> None:
        """Rewards 0, 1, 2 and 5: mean 2, unscaled -2, -1, 0, 3."""
        group = self.with_steps([0, 0], [3, 2], [[(0.0, 0), (1.0, 1), (2.0, 2)], [(5.0, 1)]])
        (got,) = advantages([group], LossConfig(advantage="process", scale_rewards="none"))
        assert got.tolist() == near([-3, -1, 0, 3, 3])

    def test_what_could_not_be_judged_takes_no_part(self) -> None:
        """An unrewarded completion's steps, and a step that is NaN: of the others 0 and 2 are left."""
        group = self.with_steps([0, NAN, 0], [2, 2, 2], [[(0.0, 0), (NAN, 1)], [(9.0, 1)], [(2.0, 1)]])
        (got,) = advantages([group], LossConfig(advantage="process", scale_rewards="none"))
        assert got.tolist() == near([-1, 0, 0, 0, 1, 1])

    def test_scaled_by_the_steps_of_the_whole_step(self) -> None:
        """0, 2 and 4: mean of all 2, variance 4."""
        groups = [self.with_steps([0, 0], [1, 1], [[(0.0, 0)], [(2.0, 0)]]), self.with_steps([0], [1], [[(4.0, 0)]])]
        got = advantages(groups, LossConfig(advantage="process", scale_rewards="batch"))
        assert [values.tolist() for values in got] == [near([-1 / 2.0001, 1 / 2.0001]), [0]]

    def test_equal_steps_teach_nothing_and_different_ones_do_whatever_the_outcome(self) -> None:
        equal = self.with_steps([0, 1], [2, 2], [[(0.3, 0), (0.3, 1)], [(0.3, 1)]])
        assert advantages([equal], LossConfig(advantage="process"))[0].tolist() == [0] * 4
        assert not equal.has_variance
        different = self.with_steps([1, 1], [2, 2], [[(0.0, 0), (0.3, 1)], [(0.3, 1)]])
        assert different.has_variance


class TestReinforcePlusPlus:
    @staticmethod
    def standardised(values: list[float]) -> Any:
        """The plain way, of those that are not None."""
        known = [value for value in values if not math.isnan(value)]
        mean = sum(known) / len(known)
        std = math.sqrt(sum((value - mean) ** 2 for value in known) / (len(known) - 1))
        return near([0.0 if math.isnan(value) else (value - mean) / (std + 1e-4) for value in values])

    def test_hand_computed(self) -> None:
        """Rewards 1 and 3 at the last tokens, and 5 in another group; penalties at each token, summed up from the end.
        A masked token has no penalty, and does not count; an unrewarded completion does neither."""
        first = make_group(
            rewards=np.array([1.0, 3.0, NAN], np.float32),
            lengths=np.array([3, 2, 1]),
            loss_mask=np.array([True, True, True, True, False, True]),
            kl_penalty=np.array([0.1, -0.2, 0.3, 0.5, 99.0, 7.0], np.float32),
        )
        second = make_group(np.array([5.0], np.float32), np.array([2]), kl_penalty=np.zeros(2))
        got = advantages([first, second], LossConfig(advantage="reinforce++", kl_in="reward"))
        to_go = [1 - 0.1 + 0.2 - 0.3, 1 + 0.2 - 0.3, 1 - 0.3, 3 - 0.5, NAN, NAN, 5, 5]
        assert [len(values) for values in got] == [6, 2]
        assert np.concatenate(got).tolist() == self.standardised(to_go)

    def test_without_a_penalty_a_group_of_one_learns_from_the_others(self) -> None:
        got = of_groups([[0.0], [1.0], [2.0]], advantage="reinforce++", beta=0)
        assert [values[0] for values in got] == self.standardised([0.0, 1.0, 2.0])

    def test_unscaled_it_is_the_deviation_from_the_steps_mean(self) -> None:
        got = of_groups([[0.0, 1.0], [5.0]], advantage="reinforce++", beta=0, scale_rewards="none")
        assert got == [[-2, -1], [3]]


class TestPenalty:
    def test_the_sum_of_a_completion_is_taken_off_its_reward(self) -> None:
        """1 - 0.75, 2 - 0.5: the masked token's penalty is not taken; the unrewarded stays out."""
        group = make_group(
            rewards=np.array([1.0, 2.0, NAN], np.float32),
            lengths=np.array([2, 2, 1]),
            loss_mask=np.array([True, True, False, True, True]),
            kl_penalty=np.array([0.25, 0.5, 99.0, 0.5, 3.0], np.float32),
        )
        settings = {"kl_in": "reward", "scale_rewards": "none"}
        (got,) = advantages([group], LossConfig.model_validate(settings))
        assert got.tolist() == near([-0.625, -0.625, 0.625, 0.625, 0])

    def test_it_can_be_all_the_difference_there_is(self) -> None:
        group = make_group(
            np.array([1.0, 1.0], np.float32), np.array([1, 1]), kl_penalty=np.array([0.5, 0.0], np.float32)
        )
        (got,) = advantages([group], LossConfig(kl_in="reward", scale_rewards="none"))
        assert got.tolist() == near([-0.25, 0.25])


@given(st.sampled_from(OUTCOMES), st.floats(-1e6, 1e6, width=32), st.integers(1, 17), st.booleans())
def test_equal_rewards_have_no_advantage_at_all(name: str, reward: float, size: int, beside_another: bool) -> None:
    """Exactly none: the mean of equal numbers need not be one of them, and its rounding must not be magnified."""
    others = [[0.0, 1.0, 2.0]] * beside_another
    assert of_groups([[reward] * size, *others], advantage=name)[0] == [0.0] * size


@given(
    st.sampled_from([*OUTCOMES, "reinforce++"]),
    st.lists(st.lists(st.floats(-8, 8, width=16) | st.just(NAN), min_size=1, max_size=12), min_size=1, max_size=5),
)
def test_whatever_the_rewards_the_advantages_are_finite_and_sum_to_nothing(
    name: str, groups: list[list[float]]
) -> None:
    """In each group, or all together."""
    got = of_groups(groups, advantage=name, beta=0)
    sums = [sum(sum(values) for values in got)] if name == "reinforce++" else [sum(values) for values in got]
    assert all(abs(total) < 1e-3 for total in sums)
    for rewards, values in zip(groups, got, strict=True):
        assert np.isfinite(values).all()
        assert all(value == 0 for reward, value in zip(rewards, values, strict=True) if math.isnan(reward))


class TestGdpo:
    def of(self, groups: Sequence[Sequence[Sequence[float]]], weights: Sequence[float], **settings: Any) -> list[float]:
        """groups: of each its rewards, of each its completions."""
        made = [
            make_group(np.zeros(len(group[0])), parts=RewardParts(np.array(group), np.array(weights)))
            for group in groups
        ]
        config = LossConfig.model_validate({"advantage": "gdpo", "advantage_eps": 1e-12} | settings)
        return [value for values in advantages(made, config) for value in values.tolist()]

    def test_hand_computed(self) -> None:
        """The first reward is -+1/sqrt 2 in each group, whatever its size; the second, of weight 2, in one of them."""
        got = self.of([[[0, 10], [0, 1]], [[0, 1], [5, 5]]], [1.0, 2.0])
        sums = np.array([-3, 3, -1, 1]) / math.sqrt(2)
        assert got == near(list(sums / math.sqrt(10 / 3)))

    def test_answers_that_differ_are_not_alike_for_the_same_sum(self) -> None:
        """Both rewards are 1 in all: the sum of rewards sees no difference."""
        rewards = [[1, 0, 0], [0, 1, 1]]
        assert self.of([rewards], [1.0, 1.0], advantage_eps=1e-4) == near([0, 0, 0])
        first, second, third = self.of([[[1, 0, 0], [0, 2, 1]]], [1.0, 0.5])
        assert first > 0 > second and first > 0 > third
        made = make_group(np.ones(3), parts=RewardParts(np.array(rewards), np.ones(2)))
        assert made.has_variance and not make_group(np.ones(3)).has_variance

    def test_a_reward_that_a_completion_lacks_adds_nothing(self) -> None:
        """The others are normalised without it."""
        got = self.of([[[0, 1, NAN], [0, 0, 1]]], [1.0, 1.0])
        second = np.array([-1, -1, 2]) / 3 / math.sqrt(1 / 3)
        sums = np.array([-1 / math.sqrt(2), 1 / math.sqrt(2), 0]) + second
        assert got == near(list((sums - sums.mean()) / sums.std(ddof=1)))

    def test_a_completion_without_a_reward_takes_no_part(self) -> None:
        group = make_group(np.array([0, 0, NAN]), parts=RewardParts(np.array([[0, 1, 9]]), np.ones(1)))
        config = LossConfig(advantage="gdpo", advantage_eps=1e-12)
        assert advantages([group], config)[0].tolist() == near([-1 / math.sqrt(2), 1 / math.sqrt(2), 0])

    @pytest.mark.parametrize("rewards", [[[NAN, NAN]], [[1, 1], [2, 2]], [[3.0]]])
    def test_without_a_difference_all_are_0(self, rewards: list[list[float]]) -> None:
        assert set(self.of([rewards], [1.0] * len(rewards))) == {0}


@given(
    st.sampled_from(OUTCOMES), st.sampled_from(["group", "batch", "none"]),
    st.lists(st.lists(st.floats(-8, 8, width=16), min_size=2, max_size=9), min_size=1, max_size=5),
    st.floats(0.5, 4), st.floats(-4, 4),
)  # fmt: skip
def test_a_shift_of_all_rewards_changes_nothing_and_a_factor_is_scaled_away(
    name: str, scale: str, groups: list[list[float]], factor: float, shift: float
) -> None:
    if name == "dr_grpo":
        scale = "none"
    settings = {"advantage": name, "scale_rewards": scale, "advantage_eps": 1e-12}
    made = [make_group(np.array(rewards)) for rewards in groups]
    moved = [make_group(group.rewards * factor + shift) for group in made]
    for rewards, one, other in zip(
        groups, *(advantages(each, LossConfig.model_validate(settings)) for each in (made, moved)), strict=True
    ):
        if max(rewards) - min(rewards) > 0.1:
            assert other == pytest.approx(one * (factor if scale == "none" else 1), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_token_of_every_group_has_one(name: str) -> None:
    lengths = [np.array([3, 1, 2]), np.array([4])]
    groups = [
        make_group(
            rewards=np.linspace(0, 1, len(own), dtype=np.float32),
            lengths=own,
            steps=StepRewards(
                rewards=np.linspace(0, 1, len(own), dtype=np.float32), ends=own - 1, counts=np.ones(len(own), np.int64)
            )
            if name == "process"
            else None,
            parts=RewardParts(np.linspace(0, 1, len(own))[None], np.ones(1)) if name == "gdpo" else None,
            reverse_kl=np.zeros(own.sum()) if name == "distill" else None,
        )
        for own in lengths
    ]
    got = advantages(groups, LossConfig.model_validate({"advantage": name, "beta": 0}))
    assert [values.shape for values in got] == [(6,), (4,)]
    for values, own in zip(got, lengths, strict=True):
        starts = np.cumsum(own) - own
        assert values.tolist() == np.repeat(values[starts], own).tolist(), "the same for every token, here"


@given(st.lists(st.lists(st.floats(-8, 8, width=16) | st.just(NAN), min_size=1, max_size=9), min_size=1, max_size=5))
def test_groups_beside_one_another_do_not_touch(groups: list[list[float]]) -> None:
    """Where a step is not standardised as a whole each has the advantages that it has alone."""
    for rewards, together in zip(groups, of_groups(groups), strict=True):
        # A sum over a longer row may be added up in another order.
        assert together == pytest.approx(of_group(*rewards), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "missing"), [({"kl_in": "reward"}, "kl_penalty"), ({"advantage": "distill"}, "reverse_kl")]
)
def test_a_group_without_an_input_that_a_setting_needs_is_refused(settings: dict[str, Any], missing: str) -> None:
    group = make_group(np.array([1.0, 0.0], np.float32), np.array([1, 1]))
    with pytest.raises(ValueError, match=rf"^{missing}: .*with_old_logps"):
        advantages([group], LossConfig.model_validate(settings))
