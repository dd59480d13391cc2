"""VESPO: a smooth weight for whole completions in place of a clip (arXiv 2602.10693)."""

import math

import torch
from torch import Tensor

from policy_trainer.config import LossConfig
from policy_trainer.objective.ratios import masked, sequence_sums

# As in the paper's code and in TRL: bounds of a token's log-ratio, and of a completion's.
_TOKEN = 20.0
_LEAST, _HIGHEST = 1e-8, 20.0


@torch.no_grad()
def vespo_weights(
    difference: Tensor,
    corrections: Tensor | None,
    advantages: Tensor,
    sequence_ids: Tensor,
    mask: Tensor,
    config: LossConfig,
) -> Tensor:
    """The weight of -A l at each token, (C,): exp(lambda + k S - lambda e^S). It is 1 at S = 0, and small for
    completions that have become much more or much less likely. k and lambda depend on the advantage's sign.

    difference: l - l_old. S is its sum over a completion's tokens, and that of the logarithms of `corrections`: weights
    for a sampler that is not the learner, which are not applied again. All (C,).
    """
    log_ratios = difference.clamp(-_TOKEN, _TOKEN)
    if corrections is not None:
        log_ratios = log_ratios + corrections.clamp(min=_LEAST).log().clamp(max=_HIGHEST)  # a weight may be 0
    log_weight = sequence_sums(masked(log_ratios, mask), sequence_ids)[sequence_ids].clamp(math.log(_LEAST), _HIGHEST)
    gains = advantages >= 0
    k = torch.where(gains, config.vespo_k_pos, config.vespo_k_neg)
    decay = torch.where(gains, config.vespo_lambda_pos, config.vespo_lambda_neg)
    return (decay + k * log_weight - decay * log_weight.exp()).exp().to(difference.dtype)
