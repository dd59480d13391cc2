"""Trust regions by hand: who loses the surrogate, and that nobody loses anything else."""

import math
from typing import Any

import pytest
import torch

from policy_trainer.config import LossConfig, MaskConfig
from policy_trainer.objective.corrections import MASKS
from policy_trainer.objective.group import LossTokens
from policy_trainer.objective.loss import TokenLoss, token_loss

# Completions of three and two tokens, of a good and a bad one. The third token does not train, however absurd.
SEQUENCE_IDS = torch.tensor([0, 0, 0, 1, 1])
MASK = torch.tensor([True, True, False, True, True])
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])
SAMPLER = torch.tensor([0.2, 0.5, 1e-9, 0.8, 0.5]).log()
NOW = torch.tensor([0.4, 0.25, 1.0, 0.4, 0.55]).log()
# The mean log-ratio of the first completion is 0, that of the second log(0.5 * 1.1) / 2, about -0.3.
ALL = [True, True, False, True, True]


def loss_of(now: torch.Tensor = NOW, sampler: torch.Tensor | None = SAMPLER, **settings: Any) -> TokenLoss:
    config = LossConfig.model_validate({"beta": 0, "old_logps": "current", "surrogate": "reinforce"} | settings)
    tokens = LossTokens(SEQUENCE_IDS, MASK, ADVANTAGES, ref_logps=SAMPLER - 0.5, sampler_logps=sampler)
    return token_loss(now, tokens, config)


@pytest.mark.parametrize(
    ("bounds", "lost"),
    [
        ({}, []),
        ({"off_policy_sequence": 0.29}, [3, 4]),
        ({"off_policy_sequence": 0.31}, []),
        ({"geometric_low": 0.7}, []),
        ({"geometric_low": 0.75}, [3, 4]),
        ({"geometric_high": 0.9}, [0, 1]),
        ({"geometric_low": 0.75, "geometric_high": 0.9}, [0, 1, 3, 4]),
        ({"geometric_low": 0.75, "geometric_high": 1.1}, [3, 4]),
        ({"dppo_high": 0.15}, [0]),
        ({"dppo_high": 0.25}, []),
        ({"dppo_low": 0.35}, [3]),
        ({"dppo_low": 0.04, "dppo_high": 0.04}, [0, 3]),  # 1 fell and is good, 4 rose and is bad: on the way back
        ({"ipo": 0.22}, [1, 3]),
        ({"ipo": 0.04}, [0, 1, 3, 4]),
        ({"ipo": 0.22, "dppo_high": 0.15}, [0, 1, 3]),
    ],
)
def test_who_loses_the_surrogate(bounds: dict[str, float], lost: list[int]) -> None:
    got = loss_of(mask=bounds)
    assert got.untrusted.nonzero().flatten().tolist() == lost
    free = loss_of().surrogate
    assert got.surrogate.tolist() == [0 if t in lost else value for t, value in enumerate(free.tolist())]


@pytest.mark.parametrize("bound", MaskConfig.model_fields)
def test_every_bound_belongs_to_a_mask(bound: str) -> None:
    [name] = MaskConfig.model_validate({bound: 0.5}).active
    assert name in MASKS


def test_what_is_exactly_at_a_bound_trains() -> None:
    """Policy and sampler are the same."""
    got = loss_of(now=SAMPLER, mask={"geometric_low": 1, "geometric_high": 1})
    assert not got.untrusted.any()


def test_the_penalties_stay() -> None:
    got = loss_of(mask={"ipo": 0.04}, beta=0.5, mismatch_penalty=0.25)
    assert not got.surrogate.any() and got.untrusted.tolist() == ALL
    penalty = 0.25 * (NOW - SAMPLER).square()
    assert got.loss.tolist() == pytest.approx(torch.where(MASK, 0.5 * got.kl + penalty, 0.0).tolist())


def test_a_sampler_that_told_nothing_is_the_old_policy() -> None:
    """With `current` the policy has not moved then; with old log-probs it has moved from these."""
    strict = {"ipo": 0.01, "geometric_low": 0.99, "geometric_high": 1.01, "off_policy_sequence": 0.01}
    assert not loss_of(sampler=None, mask=strict).untrusted.any()
    config = LossConfig.model_validate({"beta": 0, "old_logps": "recomputed", "mask": {"ipo": 0.22}})
    unknown = torch.tensor([True, True, True, False, False])
    told = torch.where(unknown, torch.nan, NOW)  # by the second completion's group alone
    tokens = LossTokens(SEQUENCE_IDS, MASK, ADVANTAGES, old_logps=SAMPLER, sampler_logps=told)
    assert token_loss(NOW, tokens, config).untrusted.tolist() == [False, True, False, False, False]


def test_a_masked_token_has_no_gradient_but_that_of_its_penalties() -> None:
    now = NOW.clone().requires_grad_()
    loss_of(now=now, mask={"ipo": 0.22}, mismatch_penalty=0.25).loss.sum().backward()
    assert now.grad is not None
    pull = 0.5 * (NOW - SAMPLER)
    surrogate = torch.tensor([-1.0, 0.0, 0.0, 0.0, 1.0])
    assert now.grad.tolist() == pytest.approx((surrogate + torch.where(MASK, pull, 0.0)).tolist())


def test_the_mismatch_penalty_wants_the_samplers_log_probs() -> None:
    with pytest.raises(ValueError, match=r"loss\.mismatch_penalty"):
        loss_of(sampler=None, mismatch_penalty=0.1)


EVERYTHING = {"off_policy_sequence": 0.1, "geometric_high": 1.1, "dppo_low": 0.1, "dppo_high": 0.1, "ipo": 0.1}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_one_token_with_an_overflowing_ratio(advantage: float, trained: bool) -> None:
    """Also where it does not train, so that the mask of the whole completion is empty."""
    logps = torch.tensor([-1.0]).requires_grad_()
    far = torch.tensor([-1e4])
    tokens = LossTokens(
        torch.tensor([0]), torch.tensor([trained]), torch.tensor([advantage]), old_logps=far, sampler_logps=far
    )
    config = LossConfig.model_validate({"beta": 0, "mask": EVERYTHING, "mismatch_penalty": 1e-3})
    got = token_loss(logps, tokens, config)
    got.loss.sum().backward()
    assert logps.grad is not None and logps.grad.isfinite().all() and got.loss.isfinite().all()
    assert got.untrusted.tolist() == [trained]
    assert math.isclose(got.loss.item(), 1e-3 * (1e4 - 1) ** 2 if trained else 0, rel_tol=1e-5)
