"""Off-policy corrections of the surrogate: importance weights, and masks that act as trust regions.

Importance weights correct for a sampler whose log-probs differ from the learner's, such as another engine. A mask
removes the surrogate where the policy has moved too far from the sampler. It affects neither the KL nor the
denominators: a removed surrogate counts as 0 in the mean.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from policy_trainer.algorithms.objective.group import LossInputs
from policy_trainer.algorithms.objective.ratios import log_ratio, sequence_means
from policy_trainer.algorithms.surrogates.sums import masked
from policy_trainer.config import LossConfig, MaskConfig


def importance_sampling_weights(
    old_logps: Float[Tensor, " C"],
    sampler_logps: Float[Tensor, " C"],
    sequence_ids: Int64[Tensor, " C"],
    mask: Bool[Tensor, " C"],
    config: LossConfig,
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"], Bool[Tensor, " C"]]:
    """Returns three tensors without a gradient: the weight of each token's surrogate, 1 where masked; this weight
    before truncation; and whether it was truncated or set to 0.

    The weights are exp(d) with d = old_logps - sampler_logps, or exp of the sum of d over the whole completion.
    sequence_ids: the completion of each token.
    """
    difference = (old_logps - sampler_logps).detach()
    weights = log_ratio(_LEVELS[config.correction_level], difference, sequence_ids, mask).exp()
    kept, clipped = CORRECTIONS[config.importance_sampling_correction](weights, config)
    return torch.where(mask, kept, 1.0), weights, mask & clipped


def _none(weights: Float[Tensor, " C"], config: LossConfig) -> tuple[Float[Tensor, " C"], Bool[Tensor, " C"]]:
    return torch.ones_like(weights), torch.zeros_like(weights, dtype=torch.bool)


def _tis(weights: Float[Tensor, " C"], config: LossConfig) -> tuple[Float[Tensor, " C"], Bool[Tensor, " C"]]:
    """Truncated importance sampling (Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy)."""
    kept = weights.clamp(config.correction_min, config.correction_max)
    return kept, kept != weights


def _mask(weights: Float[Tensor, " C"], config: LossConfig) -> tuple[Float[Tensor, " C"], Bool[Tensor, " C"]]:
    """IcePop (Ling team, Small Leak Can Sink a Great Ship)."""
    outside = (weights < config.correction_low) | (weights > config.correction_high)
    return weights.masked_fill(outside, 0.0), outside


# Each function returns the weights to use, and where they were clipped.
CORRECTIONS: dict[str, Callable[[Tensor, LossConfig], tuple[Tensor, Tensor]]] = {
    "none": _none,
    "tis": _tis,
    "mask": _mask,
}
# Names in RATIOS, by loss.correction_level.
_LEVELS = {"token": "token", "sequence": "sequence_sum"}


def kept(logps: Float[Tensor, " C"], tokens: LossInputs, config: MaskConfig) -> Bool[Tensor, " C"]:
    """Returns the tokens that train and whose surrogate no active mask removes.

    logps: log-probs under the current policy, without a gradient. tokens: must have finite sampler_logps for
    every token that trains.
    """
    keep = tokens.mask
    for name in config.active:
        keep = keep & MASKS[name](logps, tokens, config)
    return keep


def _mean_log_ratio(logps: Float[Tensor, " C"], tokens: LossInputs) -> Float[Tensor, " C"]:
    """The mean of logps - sampler_logps over the tokens that train of each token's completion."""
    assert tokens.sampler_logps is not None
    return sequence_means(masked(logps - tokens.sampler_logps, tokens.mask), tokens.sequence_ids, tokens.mask)


def _probability_change(logps: Float[Tensor, " C"], tokens: LossInputs) -> Float[Tensor, " C"]:
    """The probability of each token minus its probability when it was sampled."""
    assert tokens.sampler_logps is not None
    return logps.exp() - tokens.sampler_logps.exp()


def _off_policy_sequence(logps: Float[Tensor, " C"], tokens: LossInputs, config: MaskConfig) -> Bool[Tensor, " C"]:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, eq. 9)."""
    near = -_mean_log_ratio(logps, tokens) <= _bound(config.off_policy_sequence)
    return near | (tokens.advantages >= 0)


def _geometric(logps: Float[Tensor, " C"], tokens: LossInputs, config: MaskConfig) -> Bool[Tensor, " C"]:
    """Keeps completions whose geometric mean ratio is within the bounds (verl's Geo-RS; prime-rl's geo mask)."""
    low, high = config.geometric_low, config.geometric_high
    mean = _mean_log_ratio(logps, tokens)
    above = mean >= (-math.inf if low is None else math.log(low))
    return above & (mean <= (math.inf if high is None else math.log(high)))


def _dppo(logps: Float[Tensor, " C"], tokens: LossInputs, config: MaskConfig) -> Bool[Tensor, " C"]:
    """DPPO with the binary total variation (arXiv 2602.04879): removes tokens whose probability moved too far in the
    direction of their advantage."""
    change, advantages = _probability_change(logps, tokens), tokens.advantages
    risen = (change > _bound(config.dppo_high)) & (advantages > 0)
    fallen = (change < -_bound(config.dppo_low)) & (advantages < 0)
    return ~(risen | fallen)


def _ipo(logps: Float[Tensor, " C"], tokens: LossInputs, config: MaskConfig) -> Bool[Tensor, " C"]:
    """prime-rl's IPO: removes tokens whose probability moved too far in either direction, whatever the advantage."""
    return _probability_change(logps, tokens).abs() <= _bound(config.ipo)


def _bound(value: float | None) -> float:
    return math.inf if value is None else value


# By the names of their bounds in MaskConfig, without _low and _high.
MASKS: dict[str, Callable[[Tensor, LossInputs, MaskConfig], Tensor]] = {
    "off_policy_sequence": _off_policy_sequence,
    "geometric": _geometric,
    "dppo": _dppo,
    "ipo": _ipo,
}
