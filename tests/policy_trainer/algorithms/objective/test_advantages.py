"""Advantages by hand and their invariants; proofs/test_formulas.py has all of them against loops."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.algorithms.objective import advantages as advantages_module
from policy_trainer.algorithms.objective.advantages import advantages, gradient_norms
from policy_trainer.algorithms.objective.group import Group, RewardParts, differ, has_variance
from policy_trainer.algorithms.objective.kl import reverse_kl, teacher_kl
from policy_trainer.config import LossConfig
from policy_trainer.config import loss as loss_settings
from shared.errors import UserError
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


def test_every_advantage_has_a_formula_and_says_how_it_may_be_scaled() -> None:
    assert list(advantages_module.ADVANTAGES) == list(loss_settings.ADVANTAGES)


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

    def test_scaled_by_the_rewards_of_the_whole_step(self) -> None:
        """Rewards 0, 2, 1, 1, 6 and a NaN: mean 2, unbiased variance (4 + 0 + 1 + 1 + 16) / 4."""
        std = math.sqrt(5.5) + 1e-4
        got = of_groups([[0.0, 2.0], [1.0, NAN, 1.0], [6.0]], scale_rewards="batch")
        assert got[0] == near([-1 / std, 1 / std])
        assert got[1:] == [[0.0, 0.0, 0.0], [0.0]]

    def test_a_spread_whose_square_float32_cannot_hold(self) -> None:
        assert of_group(0.0, 1e30, 2e30) == near([-1.0, 0.0, 1.0])


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


class TestMaxRL:
    @pytest.mark.parametrize(
        ("rewards", "expected"),
        [
            ([1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),  # mean 0.25
            ([1.0, 1.0, NAN, 0.0], [0.5, 0.5, 0.0, -1.0]),  # mean 2/3
            ([0.0, 0.5, 4.0], [-1.0, -2 / 3, 5 / 3]),  # mean 1.5
            ([0.0, 0.0], [0.0, 0.0]),
            ([0.3, 0.3, 0.3], [0.0, 0.0, 0.0]),
            ([NAN, NAN], [0.0, 0.0]),
            ([2.0], [0.0]),
        ],
    )
    def test_hand_computed(self, rewards: list[float], expected: list[float]) -> None:
        assert of_group(*rewards, advantage="maxrl") == pytest.approx(expected, rel=1e-6, abs=0)

    def test_each_group_by_its_own_mean(self) -> None:
        assert of_groups([[0.0, 2.0], [0.0, 0.0, 3.0]], advantage="maxrl") == [[-1.0, 1.0], [-1.0, -1.0, 2.0]]

    def test_a_negative_reward_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"loss\.advantage: maxrl .* must be 0 or more, got -0\.5; leave out"):
            of_group(1.0, -0.5, advantage="maxrl")


class TestOptimalTokenBaseline:
    def of(self, norms: Sequence[float], mask: Sequence[bool] | None = None, **fields: Any) -> list[float]:
        """Rewards 1, 0 and NaN; 3, 2 and 1 tokens."""
        rewards, lengths = np.array([1.0, 0.0, NAN], np.float32), np.array([3, 2, 1])
        settings = {"advantage": "optimal_token_baseline", **fields.get("loss", {"beta": 0})}
        config = LossConfig.model_validate(settings)
        group = make_group(
            rewards, lengths, gradient_norms=np.array(norms), loss_mask=None if mask is None else np.array(mask),
            kl_penalty=fields.get("kl_penalty"),
        )  # fmt: skip
        (values,) = advantages([group], config)
        return values.tolist()

    def test_hand_computed(self) -> None:
        """Weights so far 1, 3, 6 and 3, 4: baselines 1/4 and 3/7; the last token of the longest has none."""
        got = self.of([1.0, 2.0, 3.0, 3.0, 1.0, 9.0])
        assert got == near([3 / 4, 4 / 7, 1.0, -1 / 4, -3 / 7, 0.0])

    def test_tokens_that_were_not_sampled_have_no_place(self) -> None:
        """The first completion's second sampled token is its third: weights 1, 4 and 3, 4, baselines 1/4 and 1/2."""
        got = self.of([1.0, 2.0, 3.0, 3.0, 1.0, 9.0], [True, False, True, True, True, True])
        assert got == near([3 / 4, 0.0, 1 / 2, -1 / 4, -1 / 2, 0.0])

    def test_penalties_count_from_their_token_on(self) -> None:
        """Returns 0.4, 0.7, 0.9 and -0.4, -0.3."""
        got = self.of(
            [1.0] * 6, kl_penalty=np.array([0.3, 0.2, 0.1, 0.1, 0.3, 5.0]), loss={"beta": 0.1, "kl_in": "reward"}
        )
        assert got == near([0.4, 0.5, 0.9, -0.4, -0.5, 0.0])

    def test_a_policy_that_is_certain_has_no_baseline(self) -> None:
        assert self.of([0.0] * 6) == near([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])

    @given(st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=9), st.sampled_from([0.5, 1.0, 3.0]))
    def test_norms_are_those_of_the_gradient(self, values: list[float], temperature: float) -> None:
        logits = torch.tensor(values, dtype=torch.float64) / temperature
        once, twice = logits.log_softmax(-1), (2 * logits).log_softmax(-1)
        expected = [(torch.eye(len(values))[i] - once.exp()).square().sum().item() for i in range(len(values))]
        bound = 8 * np.finfo(np.float64).eps * max(1, twice.abs().max().item())
        assert gradient_norms(once.numpy(), twice.numpy()).tolist() == pytest.approx(expected, rel=0, abs=bound)


class TestGdpo:
    def of(self, groups: Sequence[Sequence[Sequence[float]]], weights: Sequence[float], **settings: Any) -> list[float]:
        """groups: of each its rewards, of each its completions."""
        made = [
            make_group(np.zeros(len(group[0])), parts=RewardParts(np.array(group), np.array(weights)))
            for group in groups
        ]
        config = LossConfig.model_validate({"advantage": "gdpo", "advantage_eps": 1e-12} | settings)
        return [value for values in advantages(made, config) for value in values.tolist()]

    def test_answers_that_differ_are_not_alike_for_the_same_sum(self) -> None:
        """Both rewards are 1 in all: the sum of rewards sees no difference."""
        rewards = [[1, 0, 0], [0, 1, 1]]
        assert self.of([rewards], [1.0, 1.0], advantage_eps=1e-4) == near([0, 0, 0])
        first, second, third = self.of([[[1, 0, 0], [0, 2, 1]]], [1.0, 0.5])
        assert first > 0 > second and first > 0 > third
        made = make_group(np.ones(3), parts=RewardParts(np.array(rewards), np.ones(2)))
        assert made.has_variance and not make_group(np.ones(3)).has_variance


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
    for rewards, before, after in zip(
        groups, *(advantages(each, LossConfig.model_validate(settings)) for each in (made, moved)), strict=True
    ):
        if max(rewards) - min(rewards) > 0.1:
            assert after == pytest.approx(before * (factor if scale == "none" else 1), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "missing"), [({"kl_in": "reward"}, "kl_penalty"), ({"advantage": "distill"}, "reverse_kl")]
)
def test_a_group_without_an_input_that_a_setting_needs_is_refused(settings: dict[str, Any], missing: str) -> None:
    group = make_group(np.array([1.0, 0.0], np.float32), np.array([1, 1]))
    with pytest.raises(ValueError, match=rf"^{missing}: .*with_old_logps"):
        advantages([group], LossConfig.model_validate(settings))


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 1.0], True),
        ([1.0, 1.0], False),
        ([1.0], False),
        ([], False),
        ([NAN], False),
        ([NAN, 1.0], False),
        ([NAN, 1.0, 1.0], False),
        ([NAN, 1.0, NAN, 0.0], True),
        ([0.1, 0.1, 0.1], False),
        ([1.0, 1.0000001], True),
    ],
)
def test_variance(rewards: list[float], expected: bool) -> None:
    assert has_variance(np.array(rewards)) is expected


def test_each_row_has_its_own() -> None:
    rows = np.array([[0.0, 1.0], [1.0, 1.0], [NAN, 1.0], [NAN, NAN]])
    assert differ(rows).tolist() == [[True], [False], [False], [False]]


def test_the_metric_of_a_distillation_is_the_mean_over_trained_tokens() -> None:
    old, teacher = np.array([-1.0, -2.0, -0.5, -3.0], np.float32), np.array([-1.5, -1.0, -0.5, -0.25], np.float32)

    def group(rewards: list[float], distilled: bool = True) -> Group:
        kl = reverse_kl(old, teacher) if distilled else None
        return make_group(np.array(rewards, np.float32), np.array([2, 2]), reverse_kl=kl)

    mean = (0.5 - 1.0 + 0.5 - 1.0 + 0.0 - 2.75) / 6
    assert teacher_kl([group([0.0, NAN]), group([0.0, 0.0])]) == pytest.approx(mean)
    for nothing in ([], [group([0.0, 0.0], distilled=False)], [group([NAN, NAN])]):
        assert math.isnan(teacher_kl(nothing))
