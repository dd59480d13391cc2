"""The entropy of the policy in the loss: a bonus for it, and training on the tokens that have most of it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from policy_trainer.config import EntropyConfig, LossConfig
from policy_trainer.objective.group import Group
from policy_trainer.surrogates.sums import masked
from shared.batch import Array

# Nats. Completions of one prompt begin with the same distribution: rounding must not separate equal entropies.
_ROUNDING = 1e-6


def high_entropy(entropies: Sequence[Array], masks: Sequence[Array], quantile: float) -> list[Array]:
    """bool (C,) of each group: tokens that train and whose entropy is at or above the (1 - quantile) quantile of all
    that do (Beyond the 80/20 Rule, arXiv 2506.01939).

    entropies: (C,) of each group of an update, in nats. masks: bool (C,), tokens that train.
    """
    known = np.concatenate([entropy[mask] for entropy, mask in zip(entropies, masks, strict=True)]).astype(np.float64)
    threshold = np.quantile(known, 1 - quantile) if len(known) else 0.0
    return [mask & (entropy >= threshold - _ROUNDING) for entropy, mask in zip(entropies, masks, strict=True)]


def with_high_entropy(
    groups: Sequence[Group], config: LossConfig, entropies: Callable[[Sequence[Group]], list[Array]]
) -> list[Group]:
    """The groups of an update with their tokens of high entropy: one threshold for all, however they are cut.

    entropies: computes those of the current policy, at the cost of a forward.
    """
    if config.top_entropy_quantile == 1:
        return list(groups)
    masks = high_entropy(entropies(groups), [group.mask for group in groups], config.top_entropy_quantile)
    return [replace(group, high_entropy=mask) for group, mask in zip(groups, masks, strict=True)]


def mean_entropy(entropy: Tensor, mask: Tensor, tokens: int) -> Tensor:
    """A micro-batch's part of the mean entropy of an update, with gradient. entropy: (C,). mask: bool (C,), tokens of
    the mean. tokens: their number in the whole update."""
    return masked(entropy, mask).sum() / max(tokens, 1)


class EntropyBonus:
    """A bonus for the policy's entropy, with the coefficient of the settings or one that adapts.

    With a target the coefficient steps towards it (Skywork-OR1, arXiv 2505.22312; the rule is TRL's): nothing is
    applied in the first update, nor while the entropy is above the target.
    coef: what the run reports. entropy: mean before the latest update, in nats; None before the first, and where the
    coefficient is fixed.
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
        """Call it after an update with the policy's mean entropy before it."""
        config = self._config
        if config.target is not None:
            step = config.delta if entropy <= config.target else -config.delta
            self.coef, self.entropy = min(max(self.coef + step, config.min), config.max), entropy

    def restore(self, coef: float, entropy: float) -> None:
        """Sets what an earlier process had; a fixed coefficient stays that of the settings."""
        if self._config.target is not None:
            self.coef, self.entropy = coef, entropy
