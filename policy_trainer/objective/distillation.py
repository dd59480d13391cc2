"""On-policy distillation: a teacher's log-probs of the policy's own tokens become an advantage of each token.

The gradient is that of KL(policy || teacher) of the next token: MiniLLM (arXiv 2306.08543), on-policy GKD (2306.13649),
and Thinking Machines' On-Policy Distillation (2025). Neither rewards nor other completions take part.
"""

from collections.abc import Sequence

import numpy as np

from policy_trainer.config import LossConfig
from policy_trainer.objective.group import Group
from shared.batch import Array


def reverse_kl(old_logps: Array, teacher_logps: Array) -> Array:
    """(C,) log-probs each -> float64 (C,): log old policy - log teacher, which may have either sign."""
    return old_logps.astype(np.float64) - teacher_logps


def with_teacher(advantages: Array, group: Group, config: LossConfig) -> Array:
    """(C,) -> (C,): less loss.distillation_coef times the reverse KL of each token that trains."""
    if group.reverse_kl is None:
        return advantages
    return advantages - np.where(group.mask, config.distillation * group.reverse_kl, 0.0)


def teacher_kl(groups: Sequence[Group]) -> float:
    """Mean reverse KL of the tokens that train, in nats a token: estimates KL(policy || teacher). NaN without any."""
    known = [group.reverse_kl[group.mask] for group in groups if group.reverse_kl is not None]
    values = np.concatenate([np.zeros(0), *known])
    return float(values.mean()) if len(values) else float("nan")
