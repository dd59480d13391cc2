"""Probability ratios of two policies, per token or per completion."""

from collections.abc import Callable

from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from policy_trainer.algorithms.surrogates.sums import masked, sequence_sums

# Products of larger exponentials overflow float32. A ratio of e^30 is far outside any clipping range.
MAX_EXPONENT = 30.0


def log_ratio(
    level: str, difference: Float[Tensor, " C"], sequence_ids: Int64[Tensor, " C"], mask: Bool[Tensor, " C"]
) -> Float[Tensor, " C"]:
    """Turns differences of log-probs into log-ratios, at most MAX_EXPONENT, and 0 where masked. Masking
    only after the exponential would leave NaN gradients.

    level: a key of RATIOS. sequence_ids: the completion of each token.
    """
    return masked(RATIOS[level](masked(difference, mask), sequence_ids, mask), mask).clamp(max=MAX_EXPONENT)


def _token(
    difference: Float[Tensor, " C"], sequence_ids: Int64[Tensor, " C"], mask: Bool[Tensor, " C"]
) -> Float[Tensor, " C"]:
    return difference


def _sequence(
    difference: Float[Tensor, " C"], sequence_ids: Int64[Tensor, " C"], mask: Bool[Tensor, " C"]
) -> Float[Tensor, " C"]:
    """GSPO (arXiv 2507.18071, eq. 7): the geometric mean of the ratios of a completion's tokens."""
    return sequence_means(difference, sequence_ids, mask).to(difference.dtype)


def _sequence_sum(
    difference: Float[Tensor, " C"], sequence_ids: Int64[Tensor, " C"], mask: Bool[Tensor, " C"]
) -> Float[Tensor, " C"]:
    """The ratio of whole completions: the product of the ratios of their tokens."""
    return sequence_sums(difference, sequence_ids)[sequence_ids].to(difference.dtype)


RATIOS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token": _token,
    "sequence": _sequence,
    "sequence_sum": _sequence_sum,
}


def log_linear(
    sampler_logps: Float[Tensor, " C"], logps: Float[Tensor, " C"], staleness: Int64[Tensor, " C"]
) -> Float[Tensor, " C"]:
    """Estimates the log-probs under the policy before this step, between the sampler's and the current ones.

    This is AReaL's decoupled PPO without an extra forward pass (A-3PO, arXiv 2512.06547): l_smp + alpha (l - l_smp),
    with alpha = (v - 1 - v_b) / (v - v_b). v is the version that this step makes, v_b the sampler's. staleness:
    v - 1 - v_b, the steps in between. Fresh samples have alpha = 0.
    """
    alpha = staleness.to(logps.dtype) / (staleness + 1)
    return sampler_logps + alpha * (logps - sampler_logps)


def sequence_means(
    values: Shaped[Tensor, " C"], sequence_ids: Int64[Tensor, " C"], mask: Bool[Tensor, " C"]
) -> Float[Tensor, " C"]:
    """In the dtype of `widest_float`: gives each token the mean over its completion's tokens that train.
    values: must be 0 where masked."""
    return (sequence_sums(values, sequence_ids) / sequence_sums(mask, sequence_ids).clamp(min=1))[sequence_ids]
