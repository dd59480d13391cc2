"""KL divergences estimated from the log-probs of sampled tokens: to the reference, and to a teacher.

The estimators of the KL to the reference are from Schulman, Approximating KL Divergence. In on-policy distillation, the
teacher's log-probs of the policy's tokens become an advantage of each token. Its gradient is that of the next-token
KL(policy || teacher): MiniLLM (arXiv 2306.08543), on-policy GKD (2306.13649), Thinking Machines' On-Policy Distillation
(2025). It uses neither rewards nor other completions.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float
from torch import Tensor

from policy_trainer.algorithms.objective.group import Group
from policy_trainer.algorithms.objective.ratios import MAX_EXPONENT
from policy_trainer.config import LossConfig
from shared.batch import Array


def k1(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """-x with x = ref_logps - logps: unbiased, of either sign. As a loss, its expected on-policy gradient is 0."""
    return -x


def k2(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """x^2 / 2: biased, but its on-policy gradient is that of the KL."""
    return x.square() / 2


def k3(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """exp(x) - x - 1: unbiased and never negative.

    It uses expm1, since the plain form loses all digits near 0. Both terms are clamped: if only exp(x) were, the
    gradient beyond the clamp would drive the policy away from the reference.
    """
    x = x.clamp(max=MAX_EXPONENT)
    return x.expm1() - x


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def reverse_kl(old_logps: Array, teacher_logps: Array) -> Array:
    """(C,) log-probs each -> float64 (C,): old log-prob - the teacher's, which may have either sign."""
    return old_logps.astype(np.float64) - teacher_logps


def with_teacher(advantages: Array, group: Group, config: LossConfig) -> Array:
    """(C,) -> (C,): subtracts loss.distillation_coef times the reverse KL at tokens that train."""
    if group.reverse_kl is None:
        return advantages
    return advantages - np.where(group.mask, config.distillation * group.reverse_kl, 0.0)


def teacher_kl(groups: Sequence[Group]) -> float:
    """Returns the mean reverse KL of the tokens that train, an estimate of KL(policy || teacher) in nats per token. NaN
    without such tokens."""
    known = [group.reverse_kl[group.mask] for group in groups if group.reverse_kl is not None]
    values = np.concatenate([np.zeros(0), *known])
    return float(values.mean()) if len(values) else float("nan")
