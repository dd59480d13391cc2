"""Off-policy correction: weights for a sampler that was not quite the learner, as with another engine's kernels."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from policy_trainer.config import LossConfig
from policy_trainer.objective.ratios import log_ratio


@dataclass(frozen=True)
class CorrectionStats:
    """Per token, (C,). weights: before truncation. cut: bool, where the weight was truncated or became 0."""

    weights: Tensor
    cut: Tensor


def correction(
    old_logps: Tensor, sampler_logps: Tensor, rows: Tensor, mask: Tensor, config: LossConfig
) -> tuple[Tensor, CorrectionStats]:
    """Weights of the surrogate, (C,), without gradient, from d = old_logps - sampler_logps; 1 where masked.

    rows: int64 (C,), the completion of each token. Of a whole completion the weight is exp of the sum of its d.
    """
    difference = (old_logps - sampler_logps).detach()
    weights = log_ratio(_LEVELS[config.correction_level], difference, rows, mask).exp()
    kept, cut = CORRECTIONS[config.importance_sampling_correction](weights, config)
    return torch.where(mask, kept, 1.0), CorrectionStats(weights, mask & cut)


def _none(weights: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    return torch.ones_like(weights), torch.zeros_like(weights, dtype=torch.bool)


def _tis(weights: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling (Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy)."""
    return weights.clamp(max=config.correction_max), weights > config.correction_max


def _mask(weights: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """IcePop (Ling team, Small Leak Can Sink a Great Ship)."""
    outside = (weights < config.correction_low) | (weights > config.correction_high)
    return weights.masked_fill(outside, 0.0), outside


# What a weight becomes, and whether it was cut.
CORRECTIONS: dict[str, Callable[[Tensor, LossConfig], tuple[Tensor, Tensor]]] = {
    "none": _none,
    "tis": _tis,
    "mask": _mask,
}
# In the words of RATIOS.
_LEVELS = {"token": "token", "sequence": "sequence_sum"}
