"""The GRPO family: how rewards become advantages, and advantages a loss."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from policy_trainer.config.sections import Section

_OWN_SCALES: Mapping[str, Literal["group", "batch", "none"]] = {
    "outcome": "group",
    "process": "group",
    "dr_grpo": "none",
    "rloo": "none",
    "reinforce++": "batch",
}


class LossConfig(Section):
    """The GRPO loss: docs/mathematics.md has every formula."""

    advantage: Literal["outcome", "process", "dr_grpo", "rloo", "reinforce++"] = "outcome"
    """How rewards become advantages."""
    advantage_std: Literal["unbiased", "population"] = "unbiased"
    """Which standard deviation advantages are scaled by."""
    scale_rewards: Literal["group", "batch", "none"] | None = None
    """Over what the standard deviation is taken that rewards are divided by: the group, the whole step, or none; when
    not given, the advantage's own: group for outcome and process, batch for reinforce++, none for the others."""
    advantage_eps: float = Field(default=1e-4, gt=0)
    """Added to the standard deviation."""
    drop_zero_variance: bool = True
    """Leave out groups whose rewards are all equal: they have no advantage and would feel the KL penalty only."""
    truncated: Literal["keep", "mask", "drop"] = "keep"
    """Completions cut off at the length limit: train like others, count in the group but do not train, or neither."""
    old_logps: Literal["sampler", "recomputed", "current"] = "sampler"
    """What the ratio is taken against: the sampler's log-probs, those of the learner before its first update on a
    batch, or those of the learner now, for a ratio of 1."""
    surrogate: Literal["clip", "reinforce", "cispo", "sapo"] = "clip"
    """What is maximised for a ratio and an advantage."""
    importance_sampling_level: Literal["token", "sequence", "sequence_sum"] = "token"
    """Of each token, the geometric mean over its completion (GSPO), or the product over its completion."""
    epsilon: float = Field(default=0.2, gt=0, lt=1)
    """Ratios are clipped to [1 - epsilon, 1 + epsilon]."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """The upper bound is 1 + epsilon_high where it is given."""
    delta: float | None = Field(default=None, gt=1)
    """clip: ratios above it count as it, which bounds the loss for negative advantages."""
    ratio_max: float = Field(default=5.0, gt=0)
    """cispo: ratios are truncated there."""
    sapo_temperature_pos: float = Field(default=1.0, gt=0)
    """sapo: how sharply the gate closes where the advantage is positive."""
    sapo_temperature_neg: float = Field(default=1.05, gt=0)
    """sapo: the same for the others."""
    aggregation: Literal["sequence_mean", "token_mean", "constant"] = "sequence_mean"
    """Over tokens, then completions; over all tokens of the step; or a sum over a fixed number."""
    beta: float = Field(default=0.04, ge=0)
    """Weight of the KL penalty to the reference; with 0 no reference model is needed."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL."""
    kl_in: Literal["loss", "reward", "both"] = "loss"
    """Where the penalty is: in the loss, token by token, or taken off the rewards."""
    kl_weight: Literal["one", "ratio"] = "one"
    """ratio: the KL in the loss is weighted by the ratio, which makes its gradient unbiased."""
    importance_sampling_correction: Literal["none", "tis", "mask"] = "none"
    """For a sampler that is not the learner: weights exp(old - sampler), truncated, or 0 outside of bounds (IcePop)."""
    correction_level: Literal["token", "sequence"] = "token"
    """A weight for each token, or one for its completion."""
    correction_max: float = Field(default=2.0, gt=0)
    """tis: weights are truncated there."""
    correction_low: float = Field(default=0.5, ge=0)
    """mask: lower bound."""
    correction_high: float = Field(default=5.0, gt=0)
    """mask: upper bound."""

    @property
    def scale(self) -> Literal["group", "batch", "none"]:
        """scale_rewards, or where it is not given the advantage's own."""
        return self.scale_rewards or _OWN_SCALES[self.advantage]

    @property
    def penalises_loss(self) -> bool:
        """Whether the KL penalty is a term of the loss."""
        return self.beta > 0 and self.kl_in != "reward"

    @property
    def penalises_rewards(self) -> bool:
        """Whether the KL penalty is taken off the rewards."""
        return self.beta > 0 and self.kl_in != "loss"

    @model_validator(mode="after")
    def _makes_sense(self) -> "LossConfig":
        for nonsense in (self._scale_nonsense, self._clip_nonsense, self._kl_nonsense, self._correction_nonsense):
            if words := nonsense():
                raise ValueError(words)
        return self

    def _scale_nonsense(self) -> str | None:
        if self.advantage == "dr_grpo" and self.scale_rewards not in (None, "none"):
            return "loss.scale_rewards: dr_grpo is outcome without a scale: take loss.advantage = outcome for one"
        if self.advantage == "reinforce++" and self.scale_rewards == "group":
            return "loss.scale_rewards: reinforce++ is standardised over the whole step: take batch, or none"
        return None

    def _clip_nonsense(self) -> str | None:
        high = 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)
        if self.delta is not None and self.delta <= high:
            return f"loss.delta: must be above the upper bound of the ratio, {high:g}, which it would replace"
        return None

    def _kl_nonsense(self) -> str | None:
        if self.beta == 0 and self.kl_in != "loss":
            return f"loss.kl_in: with loss.beta = 0 there is no KL to be in {self.kl_in}: raise beta, or take loss"
        if self.kl_in == "reward" and self.kl_weight == "ratio":
            return "loss.kl_weight: weights the KL in the loss, and loss.kl_in = reward leaves none there: take both"
        if self.beta > 0 and self.kl_in == "loss" and self.advantage == "reinforce++":
            return (
                "loss.kl_in: reinforce++ takes the KL off the reward of each token: take reward (or both), or "
                "loss.beta = 0"
            )
        if self.kl_in != "loss" and self.advantage == "process":
            return "loss.kl_in: process supervision has rewards of steps, which no KL is taken off: take loss"
        return None

    def _correction_nonsense(self) -> str | None:
        if self.importance_sampling_correction != "none" and self.old_logps != "recomputed":
            return (
                "loss.importance_sampling_correction: wants loss.old_logps = recomputed; with sampler the ratio carries the staleness "
                "already, with current there is no ratio to correct"
            )
        if self.correction_low > self.correction_high:
            return "loss.correction_low: must not be above loss.correction_high: no weight would be kept"
        return None
