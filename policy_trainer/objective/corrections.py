"""Importance-sampling correction: weights for a sampler whose log-probs differ from the learner's, such as another
engine."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from policy_trainer.config import LossConfig
from policy_trainer.objective.ratios import log_ratio


@dataclass(frozen=True)
class ImportanceStats:
    """Per token, (C,). weights: before truncation. clipped: bool, where the weight was truncated or became 0."""

    weights: Tensor
    clipped: Tensor


def importance_sampling_weights(
    old_logps: Tensor, sampler_logps: Tensor, sequence_ids: Tensor, mask: Tensor, config: LossConfig
) -> tuple[Tensor, ImportanceStats]:
    """Weights of the surrogate, (C,), without gradient, from d = old_logps - sampler_logps; 1 where masked.

    sequence_ids: int64 (C,), the completion of each token. A whole completion has the weight exp(sum of its d).
    """
    difference = (old_logps - sampler_logps).detach()
    weights = log_ratio(_LEVELS[config.correction_level], difference, sequence_ids, mask).exp()
    kept, clipped = CORRECTIONS[config.importance_sampling_correction](weights, config)
    return torch.where(mask, kept, 1.0), ImportanceStats(weights, mask & clipped)


def _none(weights: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    return torch.ones_like(weights), torch.zeros_like(weights, dtype=torch.bool)


def _tis(weights: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling (Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy)."""
    kept = weights.clamp(config.correction_min, config.correction_max)
    return kept, kept != weights


def _mask(weights: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """IcePop (Ling team, Small Leak Can Sink a Great Ship)."""
    outside = (weights < config.correction_low) | (weights > config.correction_high)
    return weights.masked_fill(outside, 0.0), outside


# The weight that is used, and whether it was clipped.
CORRECTIONS: dict[str, Callable[[Tensor, LossConfig], tuple[Tensor, Tensor]]] = {
    "none": _none,
    "tis": _tis,
    "mask": _mask,
}
# Names of RATIOS.
_LEVELS = {"token": "token", "sequence": "sequence_sum"}
