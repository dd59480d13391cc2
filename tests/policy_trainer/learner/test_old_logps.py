"""The choices of old-policy log-probs, and the KL penalty that is taken off the rewards, on hand-made groups."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from policy_trainer.config import LossConfig
from policy_trainer.learner.groups import make_group, with_old_logps
from policy_trainer.learner.micro_batches import join
from policy_trainer.objective.group import Group
from shared.batch import Array

SAMPLER = [[-1.0, -2.0], [-3.0, -4.0, -5.0]]
REFERENCE = [[-1.5, -1.0], [-2.0, -4.5, -5.0]]
LEARNER = [[-0.5, -2.5], [-3.5, -4.0, -4.5]]


class Recompute:
    """Answers LEARNER for the two groups, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, groups: Sequence[Group]) -> list[Array]:
        self.calls += 1
        assert [len(group.mask) for group in groups] == [2, 3]
        return [np.array(row, np.float32) for row in LEARNER]


@pytest.fixture
def recompute() -> Recompute:
    return Recompute()


@pytest.fixture
def filled_in(make_scored: Any, recompute: Recompute) -> Any:
    """Settings of the loss -> two groups, of 2 and of 3 tokens, with their old log-probs."""

    def fill_in(**settings: Any) -> list[Group]:
        loss = LossConfig.model_validate(settings)
        batches = [
            make_scored([3], [[4], [5]], [0.0, 1.0], old_logps=SAMPLER[0], ref_logps=REFERENCE[0]),
            make_scored([3], [[4, 6], [5]], [0.0, 1.0], old_logps=SAMPLER[1], ref_logps=REFERENCE[1], number=1),
        ]
        groups = [make_group(batch, loss) for batch in batches]
        return with_old_logps(groups, loss, recompute)

    return fill_in


def values(arrays: Sequence[Array | None]) -> list[list[float] | None]:
    return [None if array is None else array.tolist() for array in arrays]


@pytest.mark.parametrize(
    ("old_logps", "expected", "calls"),
    [("sampler", SAMPLER, 0), ("recomputed", LEARNER, 1), ("current", [None, None], 0), ("log_linear", SAMPLER, 0)],
)
def test_the_ratio_is_taken_against_the_choice(
    filled_in: Any, recompute: Recompute, old_logps: str, expected: list[Any], calls: int
) -> None:
    """None is the current policy."""
    groups = filled_in(old_logps=old_logps)
    assert values([group.old_logps for group in groups]) == expected
    assert recompute.calls == calls
    assert all(group.kl_penalty is None for group in groups)


@pytest.mark.parametrize(
    ("old_logps", "in_ratio", "in_penalty", "calls"),
    [
        ("sampler", SAMPLER, SAMPLER, 0),
        ("recomputed", LEARNER, LEARNER, 1),
        ("current", [None, None], LEARNER, 1),
    ],
)
def test_a_penalty_off_the_rewards_needs_log_probs_even_where_the_ratio_does_not(
    filled_in: Any,
    recompute: Recompute,
    old_logps: str,
    in_ratio: list[Any],
    in_penalty: list[list[float]],
    calls: int,
) -> None:
    """beta times k1, which is log old policy - log reference."""
    groups = filled_in(old_logps=old_logps, kl_in="reward", kl="k1", beta=0.5)
    assert values([group.old_logps for group in groups]) == in_ratio
    assert recompute.calls == calls
    for group, old, reference in zip(groups, in_penalty, REFERENCE, strict=True):
        assert group.kl_penalty is not None
        np.testing.assert_allclose(group.kl_penalty, 0.5 * (np.array(old) - np.array(reference)))


@pytest.mark.parametrize(
    ("version", "versions", "alphas"),
    [
        (4, None, [0, 0]),  # fresh: the weights that the fifth step trains are version 4, and it makes version 5
        (3, None, [1 / 2, 1 / 2]),
        (0, None, [4 / 5, 4 / 5]),
        (1, [3, 1], [1 / 2, 3 / 4]),
        (6, None, [0, 0]),  # of an abandoned life
    ],
)
def test_log_linear_moves_old_samples_towards_the_current_policy(
    make_scored: Any, version: int, versions: list[int] | None, alphas: list[float]
) -> None:
    """alpha = (v - 1 - v_b) / (v - v_b), v the version that the step makes: one more than the steps before it."""
    loss = LossConfig(old_logps="log_linear")
    batch = make_scored([3], [[4], [5]], [0.0, 1.0], old_logps=SAMPLER[0])
    named = None if versions is None else np.array(versions)
    rollout = replace(batch.rollout, policy_version=version, policy_versions=named)
    group = make_group(replace(batch, rollout=rollout), loss, step=4)
    [group] = with_old_logps([group], loss, Recompute())
    tokens = join([group], torch.device("cpu"))
    current = torch.zeros(2)
    want = [old * (1 - alpha) for old, alpha in zip(SAMPLER[0], alphas, strict=True)]
    assert tokens.denominator(current).tolist() == pytest.approx(want)
