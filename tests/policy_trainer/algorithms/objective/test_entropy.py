import math

import numpy as np
import pytest
import torch

from policy_trainer.algorithms.objective.aggregation import update_mean
from policy_trainer.algorithms.objective.entropy import EntropyBonus, high_entropy, with_high_entropy
from policy_trainer.algorithms.objective.group import Group
from policy_trainer.config import EntropyConfig, LossConfig
from shared.batch import Array
from tests.policy_trainer.groups import make_group


class TestHighEntropy:
    def test_with_0_the_highest_remains_and_with_all_equal_all_of_them(self) -> None:
        everyone = np.ones(3, bool)
        assert high_entropy([np.array([1.0, 3.0, 2.0])], [everyone], 0.0)[0].tolist() == [False, True, False]
        assert high_entropy([np.array([1.0, 1.0, 1.0])], [everyone], 0.0)[0].all()

    def test_rounding_does_not_part_equal_entropies(self) -> None:
        [kept] = high_entropy([np.array([2.0, 2.0 - 1e-7, 1.0])], [np.ones(3, bool)], 0.0)
        assert kept.tolist() == [True, True, False]

    def test_where_nothing_trains_nothing_is_kept(self) -> None:
        assert not high_entropy([np.array([1.0, 2.0])], [np.zeros(2, bool)], 0.5)[0].any()

    def test_what_is_not_a_number_keeps_nothing(self) -> None:
        assert not high_entropy([np.array([1.0, math.nan])], [np.ones(2, bool)], 0.5)[0].any()

    def test_without_a_quantile_there_is_no_forward(self) -> None:
        def forward(groups: object) -> list[Array]:
            raise AssertionError("a forward that nobody needs")

        groups = [make_group(np.array([0.0, 1.0]))]
        [same] = with_high_entropy(groups, LossConfig(), forward)
        assert same.high_entropy is None and same.explored.all()

    def test_groups_get_theirs(self) -> None:
        groups = [make_group(np.array([0.0, 1.0])), make_group(np.array([math.nan, 1.0]))]

        def entropies(groups: object) -> list[Array]:
            return [np.array([1.0, 2.0]), np.array([9.0, 3.0])]

        marked: list[Group] = with_high_entropy(groups, LossConfig(top_entropy_quantile=0.5), entropies)
        assert [group.explored.tolist() for group in marked] == [[False, True], [False, True]]


def test_the_mean_is_over_the_whole_update() -> None:
    entropy = torch.tensor([1.0, math.nan, 3.0, 5.0], requires_grad=True)
    mask = torch.tensor([True, False, True, True])
    parts = [update_mean(entropy[part], mask[part], 3) for part in (slice(0, 2), slice(2, 4))]
    total = parts[0] + parts[1]
    total.backward()
    assert total.item() == 3 and entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])


def test_of_no_token_the_mean_is_0() -> None:
    assert update_mean(torch.tensor([math.nan]), torch.tensor([False]), 0).item() == 0


class TestBonus:
    def test_without_a_target_it_is_fixed(self) -> None:
        bonus = EntropyBonus(EntropyConfig(coef=0.02))
        bonus.observe(5.0)
        assert bonus.applied == bonus.coef == 0.02 and bonus.entropy is None
        bonus.restore(0.5, 1.0)  # of an earlier life that had a target
        assert bonus.applied == bonus.coef == 0.02

    def test_it_adapts(self) -> None:
        """By hand: first nothing, then applied only at or below the target; within the bounds."""
        bonus = EntropyBonus(EntropyConfig(coef=0.02, target=1.0, delta=0.01, min=0.01, max=0.04))
        seen = []
        for entropy in (0.5, 1.0, 0.9, 1.1, 1.2, 1.3, 1.4, 0.1):
            before = bonus.applied
            bonus.observe(entropy)
            seen.append((before, bonus.coef))
        assert [value for pair in seen for value in pair] == pytest.approx(
            [value for pair in [
                (0, 0.03), (0.03, 0.04), (0.04, 0.04), (0.04, 0.03), (0, 0.02), (0, 0.01), (0, 0.01), (0, 0.02),
            ] for value in pair]
        )  # fmt: skip
        assert bonus.applied == pytest.approx(0.02)
