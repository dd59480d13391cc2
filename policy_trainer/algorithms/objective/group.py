"""A group as the trainer holds it, made from a batch, and the inputs of the loss for the tokens of several groups."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from policy_trainer.algorithms.objective.ratios import log_linear
from shared.batch import Array, StepRewards, TokenGroup


@dataclass(frozen=True, eq=False)
class RewardParts:
    """The separate rewards of a group's completions. values: float32 (R, G), NaN where missing. weights: (R,)."""

    values: Array
    weights: Array

    @classmethod
    def of(cls, parts: Mapping[str, Array], weights: Mapping[str, float]) -> "RewardParts":
        """Takes the rewards whose weight is not 0. Raises KeyError if one of them is missing."""
        named = {name: weight for name, weight in weights.items() if weight}
        return cls(np.stack([parts[name] for name in named]), np.array([*named.values()]))


# Fields of a group that have one value per token, unless they are None or empty.
_OF_TOKENS = (
    "loss_mask", "sampler_logps", "ref_logps", "teacher_logps", "old_logps", "kl_penalty", "reverse_kl", "advantages",
    "high_entropy", "gradient_norms",
)  # fmt: skip


def _known(values: Array | None) -> bool:
    return values is not None and len(values) > 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Group:
    """A prompt with its G completions, of C tokens in all.

    tokens: prompt and completions, sampled at `temperature`. rewards: float32 (G,), NaN for completions that are left
    out. steps: the rewards of the completions' steps under process supervision, else None. parts: the separate rewards
    for gdpo, else None. sequence_mask: bool (G,), completions that train. loss_mask: bool (C,), tokens that may be
    trained on; None if all may. sampler_logps, ref_logps: float32 (C,), None if unknown. teacher_logps: float32 (C,),
    None if the loss uses no teacher. staleness: int64 (G,), for old_logps = log_linear: the number of steps between the
    weights that sampled the completion and the current ones; else None.

    The other fields are added later. old_logps: float32 (C,), log-probs under the old policy (under the sampler with
    log_linear); None means the current policy. kl_penalty: float64 (C,), beta times the KL of each token, which is
    subtracted from the rewards; None if nothing is. reverse_kl: float64 (C,), old log-prob - the teacher's; None
    without a teacher. gradient_norms: float64 (C,), as `advantages.gradient_norms` computes them; None unless the
    advantage uses them. advantages: float32 (C,), empty until they are computed. high_entropy: bool (C,), tokens that
    loss.top_entropy_quantile selects; None means all.
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
    gradient_norms: Array | None = None
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
        """bool (C,), tokens that train and that loss.top_entropy_quantile selects."""
        return self.mask if self.high_entropy is None else self.mask & self.high_entropy

    @property
    def observed(self) -> Array:
        """bool (C,), tokens that the model did not sample, behind the first that it did, in completions that train:
        what tools and environments answered, and the template's words around it."""
        if self.loss_mask is None:
            return np.zeros(len(self.tokens.completion_ids), np.bool_)
        sampled = np.cumsum(self.loss_mask)
        before = np.repeat((sampled - self.loss_mask)[np.cumsum(self.lengths) - self.lengths], self.lengths)
        return np.repeat(self.sequence_mask, self.lengths) & ~self.loss_mask & (sampled > before)

    def divided(self, count: int) -> "list[Group]":
        """Splits the completions, in order, into groups of almost equal size, for separate updates. The new groups have
        neither steps nor parts. count: at most G."""
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
        """float64 (G,), the mean advantage over each completion's tokens that train; NaN if none does."""
        if not len(self.advantages):
            return np.full(len(self.lengths), np.nan)
        starts = np.cumsum(self.lengths) - self.lengths
        sums = np.add.reduceat(np.where(self.mask, self.advantages, 0).astype(np.float64), starts)
        counts = np.add.reduceat(self.mask, starts, dtype=np.int64)
        return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)

    @property
    def compared_rewards(self) -> Array:
        """The rewards that advantages compare: one per completion, (G,), one per step, (S,), or each reward separately,
        (R, G). NaN is ignored."""
        return compared_rewards(self.rewards, self.steps, self.parts)

    @property
    def has_variance(self) -> bool:
        """Whether the compared rewards differ; with several rewards, whether those of any one do."""
        return has_variance(self.compared_rewards)


@dataclass(frozen=True)
class LossInputs:
    """The inputs of the loss: one value per token.

    sequence_ids: the index of the token's completion in the micro-batch. mask: tokens that train.
    old_logps: log-probs under the old policy. None means the current policy: the ratio is 1, with a gradient.
    ref_logps: None without a KL. importance_weights: factors of the surrogate, or None. sampler_logps: NaN or None
    where unknown. staleness: if given, old_logps are the sampler's, from which `log_linear` interpolates.
    high_entropy: those of the tokens that train that have a surrogate; None means all.
    """

    sequence_ids: Int64[Tensor, " C"]
    mask: Bool[Tensor, " C"]
    advantages: Float[Tensor, " C"]
    old_logps: Float[Tensor, " C"] | None = None
    ref_logps: Float[Tensor, " C"] | None = None
    importance_weights: Float[Tensor, " C"] | None = None
    sampler_logps: Float[Tensor, " C"] | None = None
    staleness: Int64[Tensor, " C"] | None = None
    high_entropy: Bool[Tensor, " C"] | None = None

    def denominator(self, logps: Float[Tensor, " C"]) -> Float[Tensor, " C"]:
        """The log-probs in the denominator of the ratio. logps: the current ones, without a gradient."""
        if self.old_logps is None:
            return logps
        return self.old_logps if self.staleness is None else log_linear(self.old_logps, logps, self.staleness)

    @property
    def explored(self) -> Bool[Tensor, " C"]:
        """The tokens that train and that loss.top_entropy_quantile selects."""
        return self.mask if self.high_entropy is None else self.mask & self.high_entropy


def compared_rewards(rewards: Array, steps: StepRewards | None, parts: RewardParts | None = None) -> Array:
    """Returns the parts, (R, G), or the rewards of steps, (S,), if there are any, else the rewards, (G,): NaN in
    completions without a reward."""
    if parts is not None:
        return np.where(np.isnan(rewards), np.nan, parts.values)
    return rewards if steps is None else np.where(np.repeat(np.isnan(rewards), steps.counts), np.nan, steps.rewards)


def has_variance(rewards: Array) -> bool:
    """Whether any two of the rewards (n,) differ, or any two in one row of (R, n). NaN is ignored."""
    return bool(differ(rewards).any())


def differ(rewards: Array) -> Array:
    """(..., n) -> bool (..., 1): whether any two rewards in a row differ. NaN is ignored."""
    unknown = np.isnan(rewards)
    highest = np.where(unknown, -np.inf, rewards).max(-1, keepdims=True, initial=-np.inf)
    return highest > np.where(unknown, np.inf, rewards).min(-1, keepdims=True, initial=np.inf)
