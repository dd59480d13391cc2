"""A group in training, made from a batch, and the tokens of one or more groups as the loss takes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from torch import Tensor

from policy_trainer.objective.ratios import log_linear
from shared.batch import Array, StepRewards, TokenGroup


@dataclass(frozen=True, eq=False)
class RewardParts:
    """Several rewards of a group's completions. values: float32 (R, G), NaN for none. weights: (R,)."""

    values: Array
    weights: Array

    @classmethod
    def of(cls, parts: Mapping[str, Array], weights: Mapping[str, float]) -> Self:
        """Those whose weight is not 0. Raises KeyError for one that is not there."""
        named = {name: weight for name, weight in weights.items() if weight}
        return cls(np.stack([parts[name] for name in named]), np.array([*named.values()]))


# Fields of a group with a value for each token, where they are known.
_OF_TOKENS = (
    "loss_mask", "sampler_logps", "ref_logps", "teacher_logps", "old_logps", "kl_penalty", "reverse_kl", "advantages",
    "high_entropy",
)  # fmt: skip


def _known(values: Array | None) -> bool:
    return values is not None and len(values) > 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Group:
    """A prompt with its G completions, of C tokens in all.

    tokens: prompt and completions, sampled at `temperature`. rewards: float32 (G,), NaN for completions that take no
    part. steps: the rewards of their steps under process supervision, else None. parts: the rewards apart, for gdpo,
    else None. sequence_mask: bool (G,), completions that train. loss_mask: bool (C,), tokens that may be trained on;
    None for all. sampler_logps, ref_logps: float32 (C,), None where unknown. teacher_logps: the same, None where the
    loss uses none. staleness: int64 (G,), for old_logps = log_linear: steps made since the weights that sampled each
    completion; else None. Added later: old_logps: float32 (C,), old-policy log-probs (the sampler's with log_linear);
    None means the current policy. kl_penalty: float64 (C,), beta times the KL of each token, to subtract from the
    rewards; None if it is not. reverse_kl: float64 (C,), log old policy - log teacher; None without a teacher.
    advantages: float32 (C,), empty until they are computed. high_entropy: bool (C,), tokens that train by
    loss.top_entropy_quantile; None for all.
    """

    tokens: TokenGroup
    rewards: Array
    sequence_mask: Array
    temperature: float = 1.0
    loss_mask: Array | None = None
    steps: StepRewards | None = None
    parts: RewardParts | None = None
    sampler_logps: Array | None = None
    ref_logps: Array | None = None
    staleness: Array | None = None
    teacher_logps: Array | None = None
    old_logps: Array | None = None
    kl_penalty: Array | None = None
    reverse_kl: Array | None = None
    advantages: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    high_entropy: Array | None = None

    @property
    def lengths(self) -> Array:
        """int64 (G,), tokens of each completion."""
        return self.tokens.completion_lengths

    @property
    def mask(self) -> Array:
        """bool (C,), tokens that train."""
        sequences = np.repeat(self.sequence_mask, self.lengths)
        return sequences if self.loss_mask is None else sequences & self.loss_mask

    @property
    def explored(self) -> Array:
        """bool (C,), tokens that train, and by their entropy."""
        return self.mask if self.high_entropy is None else self.mask & self.high_entropy

    def divided(self, count: int) -> "list[Group]":
        """Groups with almost equal numbers of the completions, in order, for updates: they lack the rewards of steps
        and parts. count: at most G."""
        if count == 1:
            return [self]
        tokens = self.tokens.divided(count)
        sizes = np.cumsum([part.size for part in tokens])[:-1]
        places = np.cumsum([len(part.completion_ids) for part in tokens])[:-1]
        by_completion = {name: np.split(getattr(self, name), sizes) for name in ("rewards", "sequence_mask")}
        by_token = {name: np.split(getattr(self, name), places) for name in _OF_TOKENS if _known(getattr(self, name))}
        if self.staleness is not None:
            by_completion["staleness"] = np.split(self.staleness, sizes)
        values = by_completion | by_token
        return [
            replace(self, tokens=part, steps=None, parts=None, **{name: each[i] for name, each in values.items()})
            for i, part in enumerate(tokens)
        ]

    @property
    def completion_advantages(self) -> Array:
        """float64 (G,), mean advantage of each completion's tokens that train; NaN where none does."""
        if not len(self.advantages):
            return np.full(len(self.lengths), np.nan)
        starts = np.cumsum(self.lengths) - self.lengths
        sums = np.add.reduceat(np.where(self.mask, self.advantages, 0).astype(np.float64), starts)
        counts = np.add.reduceat(self.mask, starts, dtype=np.int64)
        return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)

    @property
    def compared_rewards(self) -> Array:
        """The rewards that advantages compare: (G,) of completions, (S,) of their steps, or (R, G) of several apart;
        NaN takes no part."""
        return compared_rewards(self.rewards, self.steps, self.parts)

    @property
    def has_variance(self) -> bool:
        """Whether the compared rewards differ, of several any."""
        return has_variance(self.compared_rewards)


@dataclass(frozen=True)
class LossInputs:
    """The loss's inputs for each token, (C,). sequence_ids: int64, its completion in the micro-batch. mask: bool.

    The others are floating point. old_logps: of the old policy; None means the current policy: the ratio is 1, with a
    gradient. ref_logps: None without a KL. importance_weights: multiply the surrogate, or None. sampler_logps: NaN or
    None where unknown. staleness: int64; with it old_logps are the sampler's, and `log_linear` moves them.
    high_entropy: bool, tokens that have a surrogate, of those that train; None for all.
    """

    sequence_ids: Tensor
    mask: Tensor
    advantages: Tensor
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    importance_weights: Tensor | None = None
    sampler_logps: Tensor | None = None
    staleness: Tensor | None = None
    high_entropy: Tensor | None = None

    def denominator(self, logps: Tensor) -> Tensor:
        """(C,): the log-probs that the ratio is taken against. logps: the current ones, without a gradient."""
        if self.old_logps is None:
            return logps
        return self.old_logps if self.staleness is None else log_linear(self.old_logps, logps, self.staleness)

    @property
    def explored(self) -> Tensor:
        """bool (C,): tokens that train, and by their entropy."""
        return self.mask if self.high_entropy is None else self.mask & self.high_entropy


def compared_rewards(rewards: Array, steps: StepRewards | None, parts: RewardParts | None = None) -> Array:
    """(G,) rewards of completions, or where there are any (R, G) of their parts, or (S,) of their steps: NaN in
    completions without a reward."""
    if parts is not None:
        return np.where(np.isnan(rewards), np.nan, parts.values)
    return rewards if steps is None else np.where(np.repeat(np.isnan(rewards), steps.counts), np.nan, steps.rewards)


def has_variance(rewards: Array) -> bool:
    """Whether any two of (n,) rewards differ, or of a row of (R, n). NaN takes no part."""
    return bool(differ(rewards).any())


def differ(rewards: Array) -> Array:
    """(..., n) -> bool (..., 1): whether any two rewards of a row differ. NaN takes no part."""
    unknown = np.isnan(rewards)
    highest = np.where(unknown, -np.inf, rewards).max(-1, keepdims=True, initial=-np.inf)
    return highest > np.where(unknown, np.inf, rewards).min(-1, keepdims=True, initial=np.inf)
