"""The GRPO loss, token by token: a clipped surrogate and a KL penalty to the reference, under weights that sum to 1.

Because each token carries its weight in the whole step, the sum over any micro-batches is the loss of the step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# exp of more overflows float32 where it is multiplied; a ratio of e^30 is far outside of every clip.
_MAX_EXPONENT = 30.0


@dataclass(frozen=True)
class TokenLoss:
    """Per token, (C,): the surrogate, the KL estimate, and whether the clip took away the gradient."""

    surrogate: Tensor
    kl: Tensor
    clipped: Tensor

    def total(self, weights: Tensor, beta: float) -> Tensor:
        """Scalar: sum of weights times (surrogate + beta KL)."""
        return (weights * (self.surrogate + beta * self.kl)).sum()


def token_loss(
    logps: Tensor, old_logps: Tensor, ref_logps: Tensor, advantages: Tensor, mask: Tensor, *, clip: float
) -> TokenLoss:
    """The GRPO objective (DeepSeekMath, arXiv 2402.03300, eq. 3) per token; all arguments are (C,).

    surrogate = -min(rho A, clip(rho, 1 - clip, 1 + clip) A) with rho = exp(logps - old_logps).
    Log-probs are masked before anything is exponentiated: masking afterwards leaves NaN gradients behind.
    """
    ratio = _masked(logps - old_logps, mask).clamp(max=_MAX_EXPONENT).exp()
    clipped_ratio = ratio.clamp(1 - clip, 1 + clip)
    surrogate = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    return TokenLoss(
        surrogate=_masked(surrogate, mask),
        kl=k3(_masked(ref_logps - logps, mask)),
        clipped=mask & (ratio * advantages > clipped_ratio * advantages),
    )


def k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - x - 1 for x = ref_logps - logps: unbiased and never negative (Schulman, Approximating KL Divergence).

    Through expm1, since the plain form loses all digits near 0. Both terms are clamped: with the second one alone left
    to grow, the gradient beyond the clamp would drive the policy away from the reference.
    """
    x = log_ratio.clamp(max=_MAX_EXPONENT)
    return x.expm1() - x


def sequence_mean_weights(lengths: Tensor, mask: Tensor, trains: Tensor, *, completions: int) -> Tensor:
    """Weights (C,) under which a sum is a mean over completions of means over their tokens (GRPO, Simple-GRPO).

    lengths: (G,). mask: bool (C,). trains: bool (G,), false for completions that take no part. completions: how many
    take part in the whole step. A completion without trained tokens weighs nothing.
    """
    row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    counts = torch.zeros(len(lengths), dtype=torch.float64, device=lengths.device).index_add(0, row, mask.double())
    share = trains / (counts.clamp(min=1) * max(completions, 1))
    return torch.where(mask, share[row], 0.0)


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0)
