"""Estimators of the KL to the reference, from one log-prob of each model (Schulman, Approximating KL Divergence)."""

from collections.abc import Callable

from torch import Tensor

from policy_trainer.objective.ratios import MAX_EXPONENT


def k1(x: Tensor) -> Tensor:
    """-x for x = ref_logps - logps: unbiased, of either sign. As a loss it has an expected gradient of 0 on-policy."""
    return -x


def k2(x: Tensor) -> Tensor:
    """x^2 / 2: biased; its gradient is that of the KL."""
    return x.square() / 2


def k3(x: Tensor) -> Tensor:
    """exp(x) - x - 1: unbiased and never negative.

    By expm1, since the plain form loses all digits near 0. Both terms are clamped: if x alone grew, the gradient beyond
    the clamp would drive the policy away from the reference.
    """
    x = x.clamp(max=MAX_EXPONENT)
    return x.expm1() - x


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
