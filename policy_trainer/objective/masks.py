"""Trust regions: masks that take the surrogate away where the policy has moved too far from the sampler.

A mask multiplies the surrogate, never the KL and never a denominator: what it takes away adds 0 to the mean.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from policy_trainer.config import MaskConfig
from policy_trainer.objective.ratios import masked, sequence_means


@dataclass(frozen=True)
class Movement:
    """Per token, (C,), without gradient: log-probs of the policy and of the sampler, and what the surrogate has.

    sequence_ids: int64, the completion of each token. mask: bool, tokens that train.
    """

    logps: Tensor
    sampler_logps: Tensor
    advantages: Tensor
    sequence_ids: Tensor
    mask: Tensor

    @property
    def mean_log_ratio(self) -> Tensor:
        """(C,): the mean of log-prob - the sampler's over the trained tokens of each token's completion."""
        return sequence_means(masked(self.logps - self.sampler_logps, self.mask), self.sequence_ids, self.mask)

    @property
    def probability_change(self) -> Tensor:
        """(C,): how much more likely the token is now."""
        return self.logps.exp() - self.sampler_logps.exp()


def kept(movement: Movement, config: MaskConfig) -> Tensor:
    """bool (C,): tokens that train and keep their surrogate under every mask that is on."""
    keep = movement.mask
    for name in config.active:
        keep = keep & MASKS[name](movement, config)
    return keep


def _off_policy_sequence(movement: Movement, config: MaskConfig) -> Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, eq. 9)."""
    near = -movement.mean_log_ratio <= _bound(config.off_policy_sequence)
    return near | (movement.advantages >= 0)


def _geometric(movement: Movement, config: MaskConfig) -> Tensor:
    """Completions within bounds of the geometric mean of their ratios (verl's Geo-RS; prime-rl's geo mask)."""
    low, high = config.geometric_low, config.geometric_high
    mean = movement.mean_log_ratio
    above = mean >= (-math.inf if low is None else math.log(low))
    return above & (mean <= (math.inf if high is None else math.log(high)))


def _dppo(movement: Movement, config: MaskConfig) -> Tensor:
    """DPPO with the binary total variation (arXiv 2602.04879): no step further in the direction that went too far."""
    change, advantages = movement.probability_change, movement.advantages
    risen = (change > _bound(config.dppo_high)) & (advantages > 0)
    fallen = (change < -_bound(config.dppo_low)) & (advantages < 0)
    return ~(risen | fallen)


def _ipo(movement: Movement, config: MaskConfig) -> Tensor:
    """prime-rl's IPO: a probability that moved too far in either direction, whatever the advantage."""
    return movement.probability_change.abs() <= _bound(config.ipo)


def _bound(value: float | None) -> float:
    return math.inf if value is None else value


# By the settings that bound them.
MASKS: dict[str, Callable[[Movement, MaskConfig], Tensor]] = {
    "off_policy_sequence": _off_policy_sequence,
    "geometric": _geometric,
    "dppo": _dppo,
    "ipo": _ipo,
}
