"""Entropy of the policy in the loss: an entropy bonus, and training only on high-entropy tokens."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from policy_trainer.algorithms.objective.group import Group
from policy_trainer.config import EntropyConfig, LossConfig
from shared.batch import Array

# In nats. Completions of one prompt begin with the same distribution: rounding must not separate equal entropies.
_ROUNDING = 1e-6


def high_entropy(entropies: Sequence[Array], masks: Sequence[Array], quantile: float) -> list[Array]:
    """Returns bool (C,) for each group: tokens that train and whose entropy is at or above the (1 - quantile) quantile
    over all tokens that train (Beyond the 80/20 Rule, arXiv 2506.01939).

    entropies: (C,) for each group of an update, in nats. masks: bool (C,) for each, tokens that train.
    """
    known = np.concatenate([entropy[mask] for entropy, mask in zip(entropies, masks, strict=True)]).astype(np.float64)
    threshold = np.quantile(known, 1 - quantile) if len(known) else 0.0
    return [mask & (entropy >= threshold - _ROUNDING) for entropy, mask in zip(entropies, masks, strict=True)]


def with_high_entropy(
    groups: Sequence[Group], config: LossConfig, entropies: Callable[[Sequence[Group]], list[Array]]
) -> list[Group]:
    """Returns the groups of an update with their high-entropy tokens marked. All groups share one threshold, however
    they are split into micro-batches.

    entropies: computes the entropies under the current policy, which costs a forward pass.
    """
    if config.top_entropy_quantile == 1:
        return list(groups)
    masks = high_entropy(entropies(groups), [group.mask for group in groups], config.top_entropy_quantile)
    return [replace(group, high_entropy=mask) for group, mask in zip(groups, masks, strict=True)]


class EntropyBonus:
    """An entropy bonus with a fixed or an adaptive coefficient.

    With a target entropy, the coefficient adapts after each update (Skywork-OR1, arXiv 2505.22312; the rule is TRL's),
    and the bonus applies neither in the first update nor while the entropy is above the target.

    coef: the coefficient that the run reports. entropy: the mean entropy before the latest update, in nats; None before
    the first update, and with a fixed coefficient.
    """

    def __init__(self, config: EntropyConfig) -> None:
        self._config = config
        self.coef = config.coef
        self.entropy: float | None = None

    @property
    def applied(self) -> float:
        """The coefficient in the loss of the next update."""
        target = self._config.target
        return self.coef if target is None or (self.entropy is not None and self.entropy <= target) else 0.0

    def observe(self, entropy: float) -> None:
        """Adapts the coefficient after an update. entropy: the policy's mean entropy before that update."""
        config = self._config
        if config.target is not None:
            step = config.delta if entropy <= config.target else -config.delta
            self.coef, self.entropy = min(max(self.coef + step, config.min), config.max), entropy

    def restore(self, coef: float, entropy: float) -> None:
        """Restores the values of an earlier process. A fixed coefficient is always that of the settings."""
        if self._config.target is not None:
            self.coef, self.entropy = coef, entropy
