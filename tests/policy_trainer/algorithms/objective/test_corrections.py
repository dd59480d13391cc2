"""Importance weights by hand, and masks for trust regions; proofs/test_formulas.py has all of them against loops."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.algorithms.objective.corrections import CORRECTIONS, importance_sampling_weights
from policy_trainer.algorithms.objective.group import LossInputs
from policy_trainer.algorithms.objective.loss import TokenLoss, token_loss
from policy_trainer.config import LossConfig

# Completions of three and two tokens; the third token is masked, however absurd.
SEQUENCE_IDS = torch.tensor([0, 0, 0, 1, 1])
MASK = torch.tensor([True, True, False, True, True])
DIFFERENCES = torch.tensor([math.log(3.0), math.log(0.5), 3e38, math.log(0.1), math.log(2.0)])


@pytest.mark.parametrize(
    ("settings", "weights", "clipped"),
    [
        ({"importance_sampling_correction": "none"}, [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
        (
            {"importance_sampling_correction": "tis", "correction_min": 0.3, "correction_max": 2.5},
            [2.5, 0.5, 1, 0.3, 2], [1, 0, 0, 1, 0],
        ),
        # A masked token counts as 1, and is not clipped.
        ({"importance_sampling_correction": "tis", "correction_max": 0.6}, [0.6, 0.5, 1, 0.1, 0.6], [1, 0, 0, 0, 1]),
        ({"importance_sampling_correction": "mask"}, [3, 0.5, 1, 0, 2], [0, 0, 0, 1, 0]),
        # Products over completions: 1.5 and 0.2.
        (
            {"importance_sampling_correction": "tis", "correction_level": "sequence", "correction_max": 1.2},
            [1.2, 1.2, 1, 0.2, 0.2], [1, 1, 0, 0, 0],
        ),
        (
            {"importance_sampling_correction": "mask", "correction_level": "sequence"},
            [1.5, 1.5, 1, 0, 0], [0, 0, 0, 1, 1],
        ),
    ],
)  # fmt: skip
def test_hand_computed(settings: dict[str, Any], weights: list[float], clipped: list[int]) -> None:
    config = LossConfig.model_validate({"old_logps": "recomputed"} | settings)
    old = torch.tensor([-1.0, -2.0, 0.0, -4.0, -5.0])
    got, _, cut = importance_sampling_weights(old, old - DIFFERENCES, SEQUENCE_IDS, MASK, config)
    assert got.tolist() == pytest.approx(weights, rel=1e-5) and not got.requires_grad
    assert cut.tolist() == [bool(each) for each in clipped]


@pytest.mark.parametrize("level", ["token", "sequence"])
@given(st.sampled_from(list(CORRECTIONS)), st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=5))
def test_whatever_the_difference_weights_are_finite_and_within_bounds(
    level: str, name: str, differences: list[float]
) -> None:
    config = LossConfig.model_validate(
        {
            "old_logps": "recomputed",
            "importance_sampling_correction": name,
            "correction_level": level,
            "correction_low": 0.25,
        }
    )
    old_logps, mask = torch.tensor(differences), torch.ones(len(differences), dtype=torch.bool)
    weights, before, _ = importance_sampling_weights(
        old_logps, torch.zeros(len(differences)), torch.zeros_like(mask).long(), mask, config
    )
    assert weights.isfinite().all() and before.isfinite().all() and (weights >= 0).all()
    if name == "tis":
        assert (weights <= 2).all()
    if name == "mask":
        assert ((weights == 0) | ((weights >= 0.25) & (weights <= 5))).all()


@pytest.mark.parametrize("name", CORRECTIONS)
def test_of_equal_log_probs_is_exactly_one(name: str) -> None:
    config = LossConfig.model_validate({"old_logps": "recomputed", "importance_sampling_correction": name})
    weights, before, clipped = importance_sampling_weights(DIFFERENCES, DIFFERENCES, SEQUENCE_IDS, MASK, config)
    assert weights.tolist() == before.tolist() == [1] * 5 and not clipped.any()


# Masks for trust regions: the first completion is good, the second bad.
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])
SAMPLER = torch.tensor([0.2, 0.5, 1e-9, 0.8, 0.5]).log()
NOW = torch.tensor([0.4, 0.25, 1.0, 0.4, 0.55]).log()
# The mean log-ratio of the first completion is 0, that of the second log(0.5 * 1.1) / 2, about -0.3.
ALL = [True, True, False, True, True]


def loss_of(now: torch.Tensor = NOW, sampler: torch.Tensor | None = SAMPLER, **settings: Any) -> TokenLoss:
    config = LossConfig.model_validate({"beta": 0, "old_logps": "current", "surrogate": "reinforce"} | settings)
    tokens = LossInputs(SEQUENCE_IDS, MASK, ADVANTAGES, ref_logps=SAMPLER - 0.5, sampler_logps=sampler)
    return token_loss(now, tokens, config)


def test_what_is_exactly_at_a_bound_trains() -> None:
    """Policy and sampler are the same."""
    got = loss_of(now=SAMPLER, mask={"geometric_low": 1, "geometric_high": 1})
    assert not got.untrusted.any()


def test_the_penalties_stay() -> None:
    got = loss_of(mask={"ipo": 0.04}, beta=0.5, mismatch_penalty=0.25)
    assert got.untrusted.tolist() == ALL
    penalty = 0.25 * (NOW - SAMPLER).square()
    assert got.loss.tolist() == pytest.approx(torch.where(MASK, 0.5 * got.kl + penalty, 0.0).tolist())


def test_a_sampler_that_told_nothing_is_the_old_policy() -> None:
    """With `current` the policy has not moved then; with old log-probs it has moved from these."""
    strict = {"ipo": 0.01, "geometric_low": 0.99, "geometric_high": 1.01, "off_policy_sequence": 0.01}
    assert not loss_of(sampler=None, mask=strict).untrusted.any()
    config = LossConfig.model_validate({"beta": 0, "old_logps": "recomputed", "mask": {"ipo": 0.22}})
    unknown = torch.tensor([True, True, True, False, False])
    known = torch.where(unknown, torch.nan, NOW)  # unknown in the second completion's group
    tokens = LossInputs(SEQUENCE_IDS, MASK, ADVANTAGES, old_logps=SAMPLER, sampler_logps=known)
    assert token_loss(NOW, tokens, config).untrusted.tolist() == [False, True, False, False, False]


def test_a_masked_token_has_no_gradient_but_that_of_its_penalties() -> None:
    now = NOW.clone().requires_grad_()
    loss_of(now=now, mask={"ipo": 0.22}, mismatch_penalty=0.25).loss.sum().backward()
    assert now.grad is not None
    pull = 0.5 * (NOW - SAMPLER)
    surrogate = torch.tensor([-1.0, 0.0, 0.0, 0.0, 1.0])
    assert now.grad.tolist() == pytest.approx((surrogate + torch.where(MASK, pull, 0.0)).tolist())


EVERYTHING = {"off_policy_sequence": 0.1, "geometric_high": 1.1, "dppo_low": 0.1, "dppo_high": 0.1, "ipo": 0.1}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_one_token_with_an_overflowing_ratio(advantage: float, trained: bool) -> None:
    """Also where it does not train, so that the mask of the whole completion is empty."""
    logps = torch.tensor([-1.0]).requires_grad_()
    far = torch.tensor([-1e4])
    tokens = LossInputs(
        torch.tensor([0]), torch.tensor([trained]), torch.tensor([advantage]), old_logps=far, sampler_logps=far
    )
    config = LossConfig.model_validate({"beta": 0, "mask": EVERYTHING, "mismatch_penalty": 1e-3})
    got = token_loss(logps, tokens, config)
    got.loss.sum().backward()
    assert logps.grad is not None and logps.grad.isfinite().all() and got.loss.isfinite().all()
    assert got.untrusted.tolist() == [trained]
    assert math.isclose(got.loss.item(), 1e-3 * (1e4 - 1) ** 2 if trained else 0, rel_tol=1e-5)
