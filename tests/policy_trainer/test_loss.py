"""The token loss against hand-computed values, finite differences, and everything that overflows."""

import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from policy_trainer.loss import TokenLoss, k3, sequence_mean_weights, token_loss

INF, NAN = math.inf, math.nan


def losses(
    log_ratio: float, advantage: float, *, x: float = 0.0, clip: float = 0.2, trained: bool = True
) -> tuple[float, float, bool]:
    """Surrogate, KL and clipped of one token; x is ref_logps - logps."""
    logps = torch.tensor([-1.0], dtype=torch.float64)
    loss = token_loss(
        logps, logps - log_ratio, logps + x, torch.tensor([advantage]), torch.tensor([trained]), clip=clip
    )
    return loss.surrogate.item(), loss.kl.item(), bool(loss.clipped)


class TestSurrogate:
    @pytest.mark.parametrize(
        ("ratio", "advantage", "expected", "clipped"),
        [
            (1.0, 2.0, -2.0, False),
            (1.1, 2.0, -2.2, False),
            # A > 0: there is nothing to gain above 1 + clip; below 1 - clip the loss still pulls back.
            (1.5, 2.0, -2.4, True),
            (0.5, 2.0, -1.0, False),
            # A < 0: nothing to gain below 1 - clip; above 1 + clip it pushes down.
            (0.5, -2.0, 1.6, True),
            (1.5, -2.0, 3.0, False),
            (0.9, -2.0, 1.8, False),
            (1.5, 0.0, 0.0, False),
        ],
    )
    def test_hand_computed(self, ratio: float, advantage: float, expected: float, clipped: bool) -> None:
        surrogate, _, was_clipped = losses(math.log(ratio), advantage)
        assert surrogate == pytest.approx(expected, rel=1e-12, abs=1e-15)
        assert was_clipped is clipped

    @pytest.mark.parametrize(("advantage", "log_ratio"), [(1.0, 0.5), (-1.0, -0.5)])
    def test_a_clipped_token_has_no_gradient(self, advantage: float, log_ratio: float) -> None:
        logps = torch.tensor([-1.0], requires_grad=True)
        old, advantages = torch.tensor([-1.0 - log_ratio]), torch.tensor([advantage])
        token_loss(logps, old, torch.zeros(1), advantages, torch.tensor([True]), clip=0.2).surrogate.sum().backward()
        assert logps.grad is not None and logps.grad.item() == 0

    def test_at_ratio_one_the_gradient_is_the_policy_gradient(self) -> None:
        logps = torch.tensor([-1.0, -2.0], requires_grad=True)
        advantages = torch.tensor([0.7, -1.3])
        loss = token_loss(logps, logps.detach(), logps.detach(), advantages, torch.tensor([True, True]), clip=0.2)
        loss.total(torch.tensor([0.25, 0.75]), 0.04).backward()
        assert logps.grad is not None
        assert logps.grad.tolist() == pytest.approx([-0.25 * 0.7, 0.75 * 1.3])


class TestTotal:
    def test_by_hand(self) -> None:
        """Two tokens: ratio 1.5 clipped to 1.2 with A = 1; ratio e^-0.1 with A = -1."""
        logps = torch.tensor([math.log(0.3), math.log(0.5) - 0.1], dtype=torch.float64)
        old = torch.tensor([math.log(0.2), math.log(0.5)], dtype=torch.float64)
        ref = logps + torch.tensor([0.5, -0.25], dtype=torch.float64)
        loss = token_loss(logps, old, ref, torch.tensor([1.0, -1.0]), torch.tensor([True, True]), clip=0.2)
        kl = [math.exp(0.5) - 0.5 - 1, math.exp(-0.25) + 0.25 - 1]
        expected = 0.4 * (-1.2 + 0.1 * kl[0]) + 0.6 * (math.exp(-0.1) + 0.1 * kl[1])
        total = loss.total(torch.tensor([0.4, 0.6], dtype=torch.float64), beta=0.1)
        assert total.item() == pytest.approx(expected, rel=1e-12)

    def test_gradient_against_finite_differences(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(scale: float) -> Tensor:
            return torch.randn(200, generator=generator, dtype=torch.float64) * scale

        logps = random(1.0) - 3
        old, ref, advantages = logps + random(0.4), logps + random(0.5), random(1.0)
        mask, weights = random(1.0) > -1, random(1.0).abs()

        def total(at: Tensor) -> Tensor:
            return token_loss(at, old, ref, advantages, mask, clip=0.2).total(weights, 0.3)

        # No token stands so near to a corner that a difference would span it.
        ratios = (logps - old).exp()
        assert min((ratios - corner).abs().min() for corner in (0.8, 1.2)) > 1e-4
        assert torch.autograd.gradcheck(total, (logps.requires_grad_(),), eps=1e-6, atol=1e-7, rtol=1e-5)

    def test_both_sides_of_the_clip_are_reached_in_the_gradient_check(self) -> None:
        ratio = torch.tensor([0.5, 1.5, 0.5, 1.5])
        advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
        logps = ratio.log()
        loss = token_loss(logps, torch.zeros(4), logps, advantages, torch.ones(4, dtype=torch.bool), clip=0.2)
        assert loss.clipped.tolist() == [False, True, True, False]


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

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_never_negative(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        exponents = torch.rand(100_000, generator=generator, dtype=torch.float64) * 60 - 55
        signs = torch.randint(0, 2, (100_000,), generator=generator) * 2 - 1
        x = (signs * exponents.exp2()).to(dtype)
        # One rounding of expm1 is all that may show.
        assert (k3(x) >= -torch.finfo(dtype).eps * x.abs()).all()
        assert k3(torch.zeros(1, dtype=dtype)).item() == 0

    @pytest.mark.parametrize("x", [30.0, 88.0, 89.0, 1000.0, 3e38, -1000.0, -3e38])
    def test_overflow_is_finite_and_pulls_the_right_way_or_not_at_all(self, x: float) -> None:
        """x = ref - logps: the loss must never push logps further from ref."""
        log_ratio = torch.tensor([x], requires_grad=True)
        value = k3(log_ratio)
        value.sum().backward()
        assert value.isfinite().all() and value.item() > 0
        assert log_ratio.grad is not None and log_ratio.grad.isfinite().all()
        assert log_ratio.grad.item() * math.copysign(1, x) >= 0

    @pytest.mark.parametrize("x", [-5.0, -0.5, 0.0, 0.5, 5.0, 29.0])
    def test_gradient_is_exp_x_minus_1(self, x: float) -> None:
        log_ratio = torch.tensor([x], dtype=torch.float64, requires_grad=True)
        k3(log_ratio).sum().backward()
        assert log_ratio.grad is not None
        assert log_ratio.grad.item() == pytest.approx(math.expm1(x), rel=1e-12)


class TestMask:
    @pytest.mark.parametrize("poison", [INF, -INF, NAN, 1e30])
    @pytest.mark.parametrize("where", ["logps", "old_logps", "ref_logps", "advantages"])
    def test_what_is_masked_reaches_neither_loss_nor_gradient(self, poison: float, where: str) -> None:
        inputs = {name: torch.tensor([-1.0, -2.0, -1.5]) for name in ("logps", "old_logps", "ref_logps", "advantages")}
        mask = torch.tensor([True, False, True])
        weights = torch.tensor([0.5, 0.0, 0.5])

        def run() -> tuple[Tensor, Tensor, TokenLoss]:
            logps = inputs["logps"].clone().requires_grad_()
            loss = token_loss(logps, inputs["old_logps"], inputs["ref_logps"], inputs["advantages"], mask, clip=0.2)
            total = loss.total(weights, 0.04)
            total.backward()
            assert logps.grad is not None
            return total.detach(), logps.grad, loss

        expected_total, expected_grad, _ = run()
        inputs[where][1] = poison
        total, grad, loss = run()
        assert torch.equal(total, expected_total)
        assert torch.equal(grad, expected_grad) and grad[1] == 0
        assert loss.surrogate[1] == 0 and loss.kl[1] == 0 and not loss.clipped[1]

    def test_nothing_trained_at_all(self) -> None:
        logps = torch.tensor([-1.0, -2.0], requires_grad=True)
        none = torch.zeros(2, dtype=torch.bool)
        loss = token_loss(logps, torch.tensor([NAN, INF]), torch.zeros(2), torch.ones(2), none, clip=0.2)
        weights = sequence_mean_weights(torch.tensor([1, 1]), none, torch.tensor([True, True]), completions=2)
        total = loss.total(weights.float(), 0.04)
        total.backward()
        assert total.item() == 0
        assert logps.grad is not None and logps.grad.tolist() == [0, 0]


@pytest.mark.parametrize("log_ratio", [50.0, 100.0, 1e4, 3e38, -100.0, -3e38])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_an_overflowing_ratio_is_finite(log_ratio: float, advantage: float) -> None:
    logps = torch.tensor([log_ratio], requires_grad=True)
    loss = token_loss(logps, torch.zeros(1), torch.zeros(1), torch.tensor([advantage]), torch.tensor([True]), clip=0.2)
    total = loss.total(torch.ones(1), 0.0)
    total.backward()
    assert total.isfinite()
    assert logps.grad is not None and logps.grad.isfinite().all()
    if advantage == 0:
        assert total.item() == 0 and logps.grad.item() == 0


class TestWeights:
    def test_ragged_by_hand(self) -> None:
        """Lengths 3, 2, 1, 2; the second completion does not train, the third has no trained token."""
        mask = torch.tensor([1, 0, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
        trains = torch.tensor([True, False, True, True])
        weights = sequence_mean_weights(torch.tensor([3, 2, 1, 2]), mask, trains, completions=3)
        expected = [1 / 6, 0, 1 / 6, 0, 0, 0, 1 / 6, 1 / 6]
        assert weights.dtype == torch.float64
        assert weights.tolist() == pytest.approx(expected, rel=1e-15, abs=0)

    @pytest.mark.parametrize("seed", range(5))
    def test_they_sum_to_one(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 300, (40,), generator=generator)
        mask = torch.rand(int(lengths.sum()), generator=generator) > 0.4
        mask[lengths.cumsum(0) - 1] = True  # so that each completion trains something
        trains = torch.rand(40, generator=generator) > 0.2
        weights = sequence_mean_weights(lengths, mask, trains, completions=int(trains.sum()))
        assert weights.sum().item() == pytest.approx(1, rel=1e-14)
        per_row = torch.stack([part.sum() for part in weights.split(lengths.tolist())])
        assert per_row.tolist() == pytest.approx((trains / trains.sum()).tolist(), rel=1e-6)

    def test_a_share_of_the_step(self) -> None:
        """Half of a step's completions weigh half."""
        mask, trains = torch.ones(5, dtype=torch.bool), torch.tensor([True, True])
        assert sequence_mean_weights(torch.tensor([2, 3]), mask, trains, completions=4).sum().item() == pytest.approx(
            0.5
        )
