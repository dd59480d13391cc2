"""The token loss: clipping by hand, masks, and everything that overflows.

proofs/test_formulas.py has all of it against loops.
"""

import itertools
import math
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from policy_trainer.algorithms.objective.kl import KL_ESTIMATORS, k3
from policy_trainer.algorithms.objective.loss import LossInputs, TokenLoss, token_loss
from policy_trainer.algorithms.objective.ratios import RATIOS
from policy_trainer.algorithms.surrogates import Surrogates
from policy_trainer.config import LossConfig

INF, NAN = math.inf, math.nan
SURROGATES = list(Surrogates.model_fields)


def loss_of(
    logps: Tensor,
    old: Tensor | None = None,
    ref: Tensor | None = None,
    advantages: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    sequence_ids: Tensor | None = None,
    importance_weights: Tensor | None = None,
    **settings: Any,
) -> TokenLoss:
    """Default: advantages of 1, no KL, each token a completion, a ratio against the current log-probs."""
    defaults = {"beta": 0.0, "aggregation": "token_mean", "old_logps": "current" if old is None else "sampler"}
    tokens = LossInputs(
        sequence_ids=torch.arange(len(logps)) if sequence_ids is None else sequence_ids,
        mask=torch.ones(len(logps), dtype=torch.bool) if mask is None else mask,
        advantages=torch.ones(len(logps)) if advantages is None else advantages,
        old_logps=old,
        ref_logps=ref,
        importance_weights=importance_weights,
    )
    return token_loss(logps, tokens, LossConfig.model_validate(defaults | settings))


def losses(log_ratio: float, advantage: float, *, x: float = 0.0, **settings: Any) -> tuple[float, float, bool, bool]:
    """Loss, KL and clipped, low and high, of one token; x is ref_logps - logps."""
    logps = torch.tensor([-1.0], dtype=torch.float64)
    loss = loss_of(logps, logps - log_ratio, logps + x, torch.tensor([advantage]), **settings)
    return loss.loss.item(), loss.kl.item(), bool(loss.clipped_low), bool(loss.clipped_high)


def gradient(total: Tensor, leaf: Tensor) -> list[float]:
    (grad,) = torch.autograd.grad(total, leaf)
    return grad.tolist()


CLIPPED = [
    (1.0, 2.0, -2.0, ""),
    (1.1, 2.0, -2.2, ""),
    # A > 0: there is nothing to gain above 1 + clip; below 1 - clip the loss still pulls back.
    (1.5, 2.0, -2.4, "high"),
    (0.5, 2.0, -1.0, ""),
    # A < 0: nothing to gain below 1 - clip; above 1 + clip it pushes down.
    (0.5, -2.0, 1.6, "low"),
    (1.5, -2.0, 3.0, ""),
    (0.9, -2.0, 1.8, ""),
    (1.5, 0.0, 0.0, ""),
]


class TestClip:
    @pytest.mark.parametrize(("ratio", "advantage", "expected", "clipped"), CLIPPED)
    def test_hand_computed(self, ratio: float, advantage: float, expected: float, clipped: str) -> None:
        surrogate, _, low, high = losses(math.log(ratio), advantage)
        assert surrogate == pytest.approx(expected, rel=1e-12, abs=1e-15)
        assert (low, high) == (clipped == "low", clipped == "high")

    @pytest.mark.parametrize(
        ("ratio", "advantage", "expected", "clipped"),
        [
            # Nothing changes but for A < 0 above it: there the loss is 3 |A|, without gradient.
            *CLIPPED,
            (2.9, -2.0, 5.8, ""),
            (10.0, -2.0, 6.0, "high"),
            (10.0, 2.0, -2.4, "high"),
        ],
    )
    def test_delta(self, ratio: float, advantage: float, expected: float, clipped: str) -> None:
        surrogate, _, low, high = losses(math.log(ratio), advantage, delta=3.0)
        assert surrogate == pytest.approx(expected, rel=1e-12, abs=1e-15)
        assert (low, high) == (clipped == "low", clipped == "high")

    @pytest.mark.parametrize(
        ("advantage", "log_ratio", "delta"), [(1.0, 0.5, None), (-1.0, -0.5, None), (-1.0, 2.0, 3.0)]
    )
    def test_a_clipped_token_has_no_gradient(self, advantage: float, log_ratio: float, delta: float | None) -> None:
        logps = torch.tensor([-1.0], requires_grad=True)
        loss = loss_of(logps, logps.detach() - log_ratio, advantages=torch.tensor([advantage]), delta=delta)
        assert gradient(loss.loss.sum(), logps) == [0]


class TestCispo:
    @pytest.mark.parametrize(("ratio", "weight", "cut"), [(0.5, 0.5, False), (2.0, 2.0, False), (8.0, 5.0, True)])
    @pytest.mark.parametrize("advantage", [1.5, -1.5])
    def test_hand_computed(self, ratio: float, weight: float, cut: bool, advantage: float) -> None:
        """-sg[min(rho, 5)] A l at l = -1; also where it is truncated there is a gradient."""
        logps = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
        loss = loss_of(logps, logps.detach() - math.log(ratio), advantages=torch.tensor([advantage]), surrogate="cispo")
        assert loss.loss.item() == pytest.approx(weight * advantage, rel=1e-12)
        assert gradient(loss.loss.sum(), logps) == pytest.approx([-weight * advantage])
        assert (bool(loss.clipped_low), bool(loss.clipped_high)) == (False, cut)


@pytest.mark.parametrize(
    ("settings", "old", "message"),
    [
        ({}, False, r"old_logps: loss\.old_logps = sampler needs .* with_old_logps, or set loss\.old_logps = current"),
        ({"old_logps": "recomputed"}, False, r"old_logps: loss\.old_logps = recomputed needs"),
        ({"old_logps": "log_linear"}, True, r"staleness: loss\.old_logps = log_linear needs"),
        ({"beta": 0.1, "old_logps": "current"}, False, r"ref_logps: .*loss\.beta"),
        ({"mismatch_penalty": 0.1, "old_logps": "current"}, False, r"sampler_logps: .*loss\.mismatch_penalty"),
        ({"top_entropy_quantile": 0.2, "old_logps": "current"}, False, r"high_entropy: .*with_high_entropy"),
        (
            {"old_logps": "recomputed", "importance_sampling_correction": "tis"}, True,
            r"importance_weights: loss\.importance_sampling_correction = tis needs",
        ),
    ],
)  # fmt: skip
def test_tokens_without_an_input_that_a_setting_needs_are_refused(
    settings: dict[str, Any], old: bool, message: str
) -> None:
    logps = torch.tensor([-1.0, -2.0])
    tokens = LossInputs(
        torch.arange(2), torch.ones(2, dtype=torch.bool), torch.ones(2), old_logps=logps if old else None
    )
    with pytest.raises(ValueError, match=message):
        token_loss(logps, tokens, LossConfig.model_validate({"beta": 0.0} | settings))


@pytest.mark.parametrize("settings", [{"beta": 0.0}, {"beta": 0.1, "kl_in": "reward"}])
def test_a_kl_that_is_not_in_the_loss_is_reported(settings: dict[str, Any]) -> None:
    logps = torch.tensor([-1.0], requires_grad=True)
    loss = loss_of(logps, None, torch.tensor([-0.5]), **settings)
    assert loss.kl.item() == pytest.approx(math.exp(0.5) - 1.5)
    assert loss.loss.item() == -1 and gradient(loss.loss.sum(), logps) == [-1]


class TestK3:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("exponent", range(-30, 3, 2))
    @pytest.mark.parametrize("sign", [-1, 1])
    def test_near_zero_only_the_rounding_of_expm1_is_lost(self, dtype: torch.dtype, exponent: int, sign: int) -> None:
        x = torch.tensor(sign * 1.37 * 2.0**exponent, dtype=dtype)
        with localcontext() as context:
            context.prec = 60
            exact = Decimal(x.item())
            exact = exact.exp() - exact - 1
        # The plain form loses eps itself, not eps * |x|.
        bound = 2 * torch.finfo(dtype).eps * max(abs(x.item()), math.exp(x.item()) - 1)
        assert abs(k3(x).item() - float(exact)) <= bound

    @pytest.mark.parametrize("x", [30.0, 88.0, 89.0, 1000.0, 3e38, -1000.0, -3e38])
    def test_overflow_is_finite_and_pulls_the_right_way_or_not_at_all(self, x: float) -> None:
        """x = ref - logps: the loss must never push logps further from ref."""
        log_ratio = torch.tensor([x], requires_grad=True)
        value = k3(log_ratio)
        value.sum().backward()
        assert value.isfinite().all() and value.item() > 0
        assert log_ratio.grad is not None and log_ratio.grad.isfinite().all()
        assert log_ratio.grad.item() * math.copysign(1, x) >= 0


SETTINGS: list[dict[str, Any]] = [
    {"surrogate": surrogate, "importance_sampling_level": ratio, "kl": kl, "kl_weight": weight}
    for surrogate, ratio, kl, weight in itertools.product(SURROGATES, RATIOS, KL_ESTIMATORS, ["one", "ratio"])
]


class TestMask:
    @pytest.mark.parametrize("poison", [INF, -INF, NAN, 1e30])
    @pytest.mark.parametrize("where", ["logps", "old_logps", "ref_logps", "advantages", "correction"])
    def test_what_is_masked_reaches_neither_loss_nor_gradient(self, poison: float, where: str) -> None:
        names = ("logps", "old_logps", "ref_logps", "advantages", "correction")
        inputs = {name: torch.tensor([-1.0, -2.0, -1.5]) for name in names}
        mask, sequence_ids = torch.tensor([True, False, True]), torch.tensor([0, 0, 1])

        def run(settings: dict[str, Any]) -> tuple[Tensor, Tensor, TokenLoss]:
            logps = inputs["logps"].clone().requires_grad_()
            old, ref, advantages, weights = (inputs[name] for name in names[1:])
            settings = {"sequence_ids": sequence_ids, "importance_weights": weights, "beta": 0.1, **settings}
            loss = loss_of(logps, old, ref, advantages, mask, **settings)
            total = loss.loss.sum()
            (grad,) = torch.autograd.grad(total, logps)
            return total.detach(), grad, loss

        sane = [run(settings) for settings in SETTINGS]
        inputs[where][1] = poison
        for settings, (expected_total, expected_grad, _) in zip(SETTINGS, sane, strict=True):
            total, grad, loss = run(settings)
            assert torch.equal(total, expected_total)
            assert torch.equal(grad, expected_grad) and grad[1] == 0
            assert loss.kl[1] == 0 and loss.loss[1] == 0 and loss.ratio[1] == 1
            assert not loss.clipped_low[1] and not loss.clipped_high[1]

    @pytest.mark.parametrize("settings", SETTINGS)
    def test_nothing_trained_at_all(self, settings: dict[str, Any]) -> None:
        logps = torch.tensor([-1.0, -2.0], requires_grad=True)
        none = torch.zeros(2, dtype=torch.bool)
        loss = loss_of(logps, torch.tensor([NAN, INF]), torch.zeros(2), torch.ones(2), none, beta=0.04, **settings)
        assert loss.loss.tolist() == [0, 0]
        assert gradient(loss.loss.sum(), logps) == [0, 0]


@pytest.mark.parametrize("log_ratio", [50.0, 100.0, 1e4, 3e38, -100.0, -3e38])
@pytest.mark.parametrize("surrogate", ["clip", "sapo", "cispo", "vespo"])
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_an_overflowing_ratio_is_finite(log_ratio: float, advantage: float, surrogate: str, ratio: str) -> None:
    logps = torch.tensor([-1.0, -2.0], requires_grad=True)
    old, advantages, sequence_ids = logps.detach() - log_ratio, torch.full((2,), advantage), torch.tensor([0, 0])
    settings: dict[str, Any] = {"surrogate": surrogate, "importance_sampling_level": ratio}
    loss = loss_of(logps, old, advantages=advantages, sequence_ids=sequence_ids, **settings)
    grad = gradient(loss.loss.sum(), logps)
    assert loss.loss.isfinite().all() and loss.ratio.isfinite().all()
    assert all(map(math.isfinite, grad))
    if advantage == 0:
        assert loss.loss.tolist() == [0, 0] and grad == [0, 0]


@pytest.mark.parametrize("x", [50.0, 1e4, 3e38, -3e38])
@pytest.mark.parametrize("weight", ["one", "ratio"])
def test_an_overflowing_k3_is_finite(x: float, weight: str) -> None:
    """Also weighted by a ratio that overflows."""
    logps = torch.tensor([0.0], requires_grad=True)
    loss = loss_of(logps, torch.tensor([-100.0]), torch.tensor([x]), torch.zeros(1), beta=0.04, kl_weight=weight)
    grad = gradient(loss.loss.sum(), logps)
    if x > 0 or weight == "one":
        assert loss.loss.isfinite().all() and all(map(math.isfinite, grad))


@given(
    st.sampled_from(SURROGATES),
    st.sampled_from(list(RATIOS)),
    st.lists(st.floats(-5, 5), min_size=1, max_size=6),
    st.floats(-3, 3),
)
def test_a_ratio_of_one_is_the_policy_gradient_for_every_surrogate(
    surrogate: str, ratio: str, logps: list[float], advantage: float
) -> None:
    """In one completion whose loss is the mean over its tokens, but for the product, which counts it once a token."""
    leaf = torch.tensor(logps, dtype=torch.float64, requires_grad=True)
    settings: dict[str, Any] = {"surrogate": surrogate, "importance_sampling_level": ratio}
    loss = loss_of(
        leaf, advantages=torch.full_like(leaf, advantage), sequence_ids=torch.zeros_like(leaf).long(), **settings
    )
    slope = -advantage * (len(logps) if ratio == "sequence_sum" and surrogate in ("clip", "sapo") else 1)
    assert gradient(loss.loss.sum(), leaf) == pytest.approx([slope] * len(logps), abs=1e-12)
