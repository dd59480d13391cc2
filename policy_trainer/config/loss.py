"""The GRPO family: how rewards become advantages, and advantages a loss."""

from typing import Literal

from pydantic import Field, model_validator

from policy_trainer.config.section import Section


class LossConfig(Section):
    """The GRPO loss: docs/mathematics.md has every formula."""

    advantage: Literal["outcome", "process", "dr_grpo", "rloo", "reinforce++"] = "outcome"
    """How rewards become advantages."""
    advantage_std: Literal["unbiased", "population"] = "unbiased"
    """Which standard deviation advantages are scaled by."""
    advantage_scale: Literal["group", "batch", "none"] | None = None
    """What is standardised: the group, the whole step, or nothing; the advantage's own when not given."""
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
    ratio: Literal["token", "sequence", "sequence_sum"] = "token"
    """Of each token, the geometric mean over its completion (GSPO), or the product over its completion."""
    clip: float = Field(default=0.2, gt=0, lt=1)
    """Ratios are clipped to [1 - clip, 1 + clip]."""
    clip_high: float | None = Field(default=None, gt=0)
    """The upper bound is 1 + clip_high where it is given."""
    dual_clip: float | None = Field(default=None, gt=1)
    """clip: ratios above it count as it, which bounds the loss for negative advantages."""
    ratio_max: float = Field(default=5.0, gt=0)
    """cispo: ratios are truncated there."""
    sapo_tau_pos: float = Field(default=1.0, gt=0)
    """sapo: how sharply the gate closes where the advantage is positive."""
    sapo_tau_neg: float = Field(default=1.05, gt=0)
    """sapo: the same for the others."""
    mean: Literal["sequence_mean", "token_mean", "constant"] = "sequence_mean"
    """Over tokens, then completions; over all tokens of the step; or a sum over a fixed number."""
    beta: float = Field(default=0.04, ge=0)
    """Weight of the KL penalty to the reference; with 0 no reference model is needed."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL."""
    kl_in: Literal["loss", "reward", "both"] = "loss"
    """Where the penalty is: in the loss, token by token, or taken off the rewards."""
    kl_weight: Literal["one", "ratio"] = "one"
    """ratio: the KL in the loss is weighted by the ratio, which makes its gradient unbiased."""
    correction: Literal["none", "tis", "mask"] = "none"
    """For a sampler that is not the learner: weights exp(old - sampler), truncated, or 0 outside of bounds (IcePop)."""
    correction_level: Literal["token", "sequence"] = "token"
    """tis: a weight for each token, or one for its completion."""
    correction_max: float = Field(default=2.0, gt=0)
    """tis: weights are truncated there."""
    correction_low: float = Field(default=0.5, ge=0)
    """mask: lower bound."""
    correction_high: float = Field(default=5.0, gt=0)
    """mask: upper bound."""

    @model_validator(mode="after")
    def _makes_sense(self) -> "LossConfig":
        if self.correction != "none" and self.old_logps != "recomputed":
            raise ValueError(
                "loss.correction: wants loss.old_logps = recomputed; with sampler the ratio carries the staleness "
                "already, with current there is no ratio to correct"
            )
        return self
