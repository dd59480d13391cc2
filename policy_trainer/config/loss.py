"""Settings of the loss: how rewards become advantages, how advantages become a loss, and which tokens train."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, model_validator

from policy_trainer.algorithms.surrogates import Surrogate, SurrogateName, Surrogates
from policy_trainer.config.functions import FunctionName, NameOrFunction, is_function
from policy_trainer.config.marks import Travel
from shared.settings import InHelp, Section


class EntropyConfig(Section):
    """The bonus adds -coef times the mean entropy of the tokens that train to the loss, so that the policy keeps
    exploring."""

    coef: float = Field(default=0.0, ge=0)
    """Coefficient of the bonus; with a target, the one that the run begins with."""
    target: float | None = Field(default=None, ge=0)
    """Target entropy, in nats per token. After each update the coefficient rises by delta if the entropy is at or below
    this, else it falls; the bonus applies only while the entropy is at or below it. A good value is the metric
    `entropy` of the first steps. Default: the coefficient is fixed."""
    delta: float = Field(default=0.005, gt=0)
    """With a target: how far the coefficient moves after an update."""
    min: float = Field(default=0.0, ge=0)
    """With a target: least coefficient."""
    max: float = Field(default=1.0, ge=0)
    """With a target: largest coefficient."""

    @model_validator(mode="after")
    def _check_combinations(self) -> "EntropyConfig":
        if self.target is None:
            for name in ("delta", "min", "max"):
                if getattr(self, name) != EntropyConfig.model_fields[name].default:
                    raise ValueError(f"loss.entropy.{name}: the coefficient is fixed without loss.entropy.target")
        elif self.min > self.max:
            raise ValueError("loss.entropy.min: must not be above loss.entropy.max")
        elif not self.min <= self.coef <= self.max:
            raise ValueError("loss.entropy.coef: must lie between loss.entropy.min and loss.entropy.max")
        return self


class MaskConfig(Section):
    """Tokens outside these bounds lose their surrogate, but keep their KL and still count as tokens. A mask without a
    bound is off; several may be on. They compare the current policy with the sampler."""

    off_policy_sequence: float | None = Field(default=None, gt=0)
    """Nats a token: a completion whose log-probs fell by more than this on average since it was sampled does not train
    where its advantage is negative (DeepSeek-V3.2). 0.5 is a common value."""
    geometric_low: float | None = Field(default=None, gt=0)
    """A completion does not train where the geometric mean of its tokens' ratios is below this. verl takes 0.999 for
    another engine with the same weights, prime-rl took 0.1 for older weights."""
    geometric_high: float | None = Field(default=None, gt=0)
    """The same from above: 1.001 for another engine, 10 for older weights."""
    dppo_low: float | None = Field(default=None, gt=0, le=1)
    """A token with a negative advantage does not train where its probability fell by more than this (DPPO's binary
    total variation). verl takes 0.15, prime-rl 0.2."""
    dppo_high: float | None = Field(default=None, gt=0, le=1)
    """The same for a positive advantage and a probability that rose: 0.15 or 0.2."""
    ipo: float | None = Field(default=None, gt=0, le=1)
    """A token does not train where its probability moved by more than this, whatever its advantage (prime-rl's IPO,
    which takes 0.1)."""

    @property
    def active(self) -> set[str]:
        """Names of the masks that have a bound."""
        return {name.removesuffix("_low").removesuffix("_high") for name, bound in self if bound is not None}

    @model_validator(mode="after")
    def _keeps_something(self) -> "MaskConfig":
        low, high = self.geometric_low, self.geometric_high
        if low is not None and high is not None and low > high:
            raise ValueError("loss.mask.geometric_low: must not be above loss.mask.geometric_high: nothing would train")
        return self


Scale: TypeAlias = Literal["group", "batch", "none"]


@dataclass(frozen=True)
class Advantage:
    """The settings that can be combined with an advantage. scales: the values of loss.scale_rewards, the default first.
    no_kl: why the KL cannot be subtracted from its rewards (loss.kl_in); empty if it can."""

    scales: tuple[Scale, ...]
    no_kl: str = ""


ADVANTAGES: Mapping[str, Advantage] = {
    "outcome": Advantage(("group", "batch", "none")),
    "process": Advantage(("group", "batch", "none"), "the KL cannot be subtracted from the rewards of steps (process)"),
    "dr_grpo": Advantage(("none",)),
    "rloo": Advantage(("none", "group", "batch")),
    "reinforce++": Advantage(("batch", "none")),
    "gdpo": Advantage(("batch",), "gdpo normalises each reward separately: no sum to subtract the KL from"),
    "distill": Advantage(("none",), "distill uses no rewards, so there is nothing to subtract the KL from"),
    "maxrl": Advantage(("none",), "maxrl needs rewards of 0 or more, and the KL would make them negative"),
    "optimal_token_baseline": Advantage(("none",)),
}
if TYPE_CHECKING:
    AdvantageName: TypeAlias = str
else:
    AdvantageName = Literal[tuple(ADVANTAGES)]


class LossConfig(Surrogates):
    """The GRPO loss: docs/mathematics.md has every formula."""

    advantage: Annotated[
        AdvantageName | FunctionName,
        NameOrFunction(),
        Travel.PUBLISHED,
        InHelp("replay"),
    ] = "outcome"
    """How rewards become advantages (docs/mathematics.md): outcome and process are GRPO with one reward per completion,
    or per step; distill takes a teacher's log-probs instead of rewards. Or module:name, your own function
    (docs/pieces.md)."""
    distillation_coef: float | None = Field(default=None, ge=0)
    """Weight of the teacher: the advantage of each token is lowered by this times (old log-prob - the teacher's).
    Default: 1 with advantage distill, else 0, which needs no teacher."""
    advantage_std: Literal["unbiased", "population"] = "unbiased"
    """Standard deviation that divides the rewards: with G - 1 in the denominator (unbiased), or G (population)."""
    scale_rewards: Scale | None = None
    """Rewards are divided by the standard deviation of their group, of the whole step (batch), or not at all. Default:
    group for advantage outcome and process, batch for reinforce++ and gdpo, none for the others. Your own function may
    follow this setting or ignore it."""
    advantage_eps: float = Field(default=1e-4, gt=0)
    """Added to the standard deviation, against a division by zero."""
    drop_zero_variance: bool = True
    """Drop groups whose rewards are all equal: their advantages are 0, so only the KL penalty would train on them."""
    truncated: Literal["keep", "mask", "drop"] = "keep"
    """Completions cut off at the length limit. keep: they train like others. mask: they count in the group but do not
    train. drop: they neither count nor train."""
    old_logps: Literal["sampler", "recomputed", "current", "log_linear"] = "sampler"
    """Denominator of the ratio: the sampler's log-probs; the learner's before its first update on a batch; the
    learner's current ones, which makes the ratio 1; or log_linear: those before the first update, estimated between
    sampler and learner by the age of the sample, without a forward (AReaL)."""
    surrogate: Annotated[SurrogateName | FunctionName, NameOrFunction(), InHelp("replay")] = "clip"
    """Objective per ratio and advantage: PPO's clipped ratio, REINFORCE, CISPO, SAPO, VESPO, or module:name, your own
    function (docs/pieces.md). A surrogate's own settings are the table of its name."""
    settings: dict[str, Any] = Field(default={})
    """Settings of your own surrogate or advantage, a table of your choice: it reads them as config.settings."""
    importance_sampling_level: Literal["token", "sequence", "sequence_sum"] = "token"
    """Ratio of each token, the geometric mean of the ratios of a completion (GSPO), or their product."""
    epsilon: float = Field(default=0.2, gt=0, lt=1)
    """Surrogate clip: ratios are clipped to [1 - epsilon, 1 + epsilon]."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """Surrogate clip: ratios are clipped to 1 + epsilon_high from above. Default: epsilon."""
    delta: float | None = Field(default=None, gt=1)
    """Surrogate clip: ratios above delta count as delta, which bounds the loss for negative advantages."""
    aggregation: Annotated[Literal["sequence_mean", "token_mean", "constant", "luspo"], InHelp("replay")] = (
        "sequence_mean"
    )
    """How token losses are averaged: over tokens, then completions (sequence_mean); over all tokens of the step
    (token_mean); their sum divided by a fixed number (constant); or summed over tokens, averaged over completions
    (luspo)."""
    beta: Annotated[float, InHelp("train doctor replay")] = Field(default=0.04, ge=0)
    """Weight of the KL penalty to the reference. With 0 no reference model is needed."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence."""
    kl_in: Literal["loss", "reward", "both"] = "loss"
    """Where the KL penalty is applied: added to the loss of each token, subtracted from the rewards, or both."""
    kl_weight: Literal["one", "ratio"] = "one"
    """ratio: the KL in the loss is weighted by the ratio, which makes its gradient unbiased."""
    importance_sampling_correction: Literal["none", "tis", "mask"] = "none"
    """Correct for a sampler whose log-probs differ from the learner's, by weights exp(old - sampler): truncated (tis),
    or set to 0 outside of bounds (mask, as in IcePop)."""
    correction_level: Literal["token", "sequence"] = "token"
    """One correction weight per token, or one per completion."""
    correction_max: float = Field(default=2.0, gt=0)
    """Correction tis: upper bound of the weights."""
    correction_min: float | None = Field(default=None, ge=0)
    """Correction tis: lower bound of the weights. Default: none, as weights are above 0."""
    correction_low: float = Field(default=0.5, ge=0)
    """Correction mask: lower bound of the weights that are kept."""
    correction_high: float = Field(default=5.0, gt=0)
    """Correction mask: upper bound of the weights that are kept."""
    mask: MaskConfig = MaskConfig()
    mismatch_penalty: float = Field(default=0.0, ge=0)
    """Weight of (log-prob - the sampler's)^2 in the loss of each token, which draws the policy to the sampler. prime-rl
    takes 0.001."""
    router_aux_loss_coef: Annotated[float, Field(ge=0)] | Literal["model"] = 0.0
    """Mixtures of experts: weight of the auxiliary loss that keeps the experts equally busy, such as 0.001; model: that
    of the model's own configuration. Not for several ranks."""
    echo_coef: float = Field(default=0.0, ge=0)
    """Weight of the cross-entropy of what tools and environments answered, which teaches the policy to expect it
    (ECHO). The paper takes 0.05. Groups whose rewards are all equal then train, too."""
    entropy: EntropyConfig = EntropyConfig()
    top_entropy_quantile: float = Field(default=1.0, ge=0, le=1)
    """Only this share of the tokens, those with the highest entropy in each update, has a surrogate; the paper uses
    0.2. It costs an extra forward. 1: all tokens; 0: only the tokens that share the maximum entropy."""

    @property
    def scale(self) -> Scale:
        """The value of scale_rewards, or the advantage's default if it is not set."""
        known = ADVANTAGES.get(self.advantage)
        return self.scale_rewards or (known.scales[0] if known else "none")

    @property
    def chosen_surrogate(self) -> Surrogate | None:
        """The built-in surrogate that loss.surrogate names, with its settings; None for the user's own function."""
        return None if is_function(self.surrogate) else getattr(self, self.surrogate)

    @property
    def weighs_completions(self) -> bool:
        """Whether the surrogate itself weights whole completions."""
        return self.chosen_surrogate is not None and self.chosen_surrogate.weighs_completions

    @property
    def needs_sampler_logps(self) -> bool:
        """Whether training needs the sampler's log-probs. Masks do not: they fall back on the old ones."""
        return (
            self.old_logps in ("sampler", "log_linear")
            or self.importance_sampling_correction != "none"
            or self.mismatch_penalty > 0
        )

    @property
    def distillation(self) -> float:
        """The value of distillation_coef, or the advantage's default if it is not set."""
        return float(self.advantage == "distill") if self.distillation_coef is None else self.distillation_coef

    @property
    def needs_variance(self) -> bool:
        """Whether groups whose rewards are all equal are left out. A teacher gives such groups advantages, too, and
        ECHO learns from their observations."""
        return self.drop_zero_variance and not self.distillation and not self.echo_coef

    @property
    def needs_gradient_norms(self) -> bool:
        """Whether the advantage weights tokens by the gradients of their log-probs."""
        return self.advantage == "optimal_token_baseline"

    @property
    def penalises_loss(self) -> bool:
        """Whether the KL penalty is a term of the loss."""
        return self.beta > 0 and self.kl_in != "reward"

    @property
    def penalises_rewards(self) -> bool:
        """Whether the KL penalty is subtracted from the rewards."""
        return self.beta > 0 and self.kl_in != "loss"

    @model_validator(mode="after")
    def _check_combinations(self) -> "LossConfig":
        errors = (self._scale_errors(), self._kl_errors(), self._correction_errors(), self._surrogate_errors())
        if message := next(chain(*errors), None):
            raise ValueError(message)
        return self

    def _scale_errors(self) -> Iterator[str]:
        known = ADVANTAGES.get(self.advantage)
        if known and self.scale_rewards is not None and self.scale_rewards not in known.scales:
            others = [name for name, other in ADVANTAGES.items() if self.scale_rewards in other.scales]
            yield (
                f"loss.scale_rewards: must be {' or '.join(known.scales)} with loss.advantage = {self.advantage}, got "
                f"{self.scale_rewards}: leave it out, or use loss.advantage = {' or '.join(others)}"
            )
        if self.advantage == "distill" and not self.distillation:
            yield (
                "loss.distillation_coef: with 0 nothing is left of loss.advantage = distill: leave it out, or raise it"
            )

    def _kl_errors(self) -> Iterator[str]:
        if self.beta > 0 and self.kl_in == "loss" and self.advantage == "reinforce++":
            yield (
                "loss.kl_in: reinforce++ subtracts the KL from the reward of each token: use reward (or both), or "
                "loss.beta = 0"
            )
        if self.kl_in == "reward" and self.kl_weight == "ratio":
            yield "loss.kl_weight: ratio weights the KL in the loss, but loss.kl_in = reward puts none there: use both"
        if self.kl_in == "loss":
            return
        if self.beta == 0:
            yield f"loss.kl_in: {self.kl_in} needs a KL penalty, but loss.beta = 0: raise beta, or use loss"
        if self.old_logps == "log_linear":
            yield (
                "loss.kl_in: log_linear computes old log-probs at the update, too late for the rewards: use loss, or "
                "loss.old_logps = recomputed"
            )
        known = ADVANTAGES.get(self.advantage)
        if known and known.no_kl:
            yield f"loss.kl_in: {known.no_kl}: use loss"
        if is_function(self.advantage):
            yield "loss.kl_in: must be loss with your own loss.advantage, whose rewards do not include the KL penalty"

    def _correction_errors(self) -> Iterator[str]:
        if self.importance_sampling_correction != "none" and self.old_logps not in ("recomputed", "log_linear"):
            yield (
                "loss.importance_sampling_correction: needs loss.old_logps = recomputed or log_linear; with sampler "
                "the ratio is against the sampler already, with current there is no ratio to correct"
            )
        if self.correction_low > self.correction_high:
            yield "loss.correction_low: must not be above loss.correction_high: no weight would be kept"
        if self.correction_min is None:
            return
        if self.importance_sampling_correction != "tis":
            yield "loss.correction_min: only tis truncates weights: use loss.correction_low with mask, or leave it out"
        if self.correction_min >= self.correction_max:
            yield f"loss.correction_min: must be below loss.correction_max, {self.correction_max:g}"

    def _surrogate_errors(self) -> Iterator[str]:
        high = 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)
        if self.delta is not None and self.delta <= high:
            yield f"loss.delta: must be above the upper clipping bound of the ratio, {high:g}, got {self.delta:g}"
        if self.settings and not (is_function(self.surrogate) or is_function(self.advantage)):
            yield "loss.settings: only your own surrogate or advantage reads them; each built-in one has its own table"
        if not self.weighs_completions:
            return
        if self.aggregation != "token_mean":
            yield (
                f"loss.aggregation: {self.surrogate} weighs whole completions, and averages over all tokens: use "
                "token_mean"
            )
        if self.importance_sampling_correction != "none" and self.correction_level == "sequence":
            yield (
                f"loss.correction_level: {self.surrogate} multiplies the corrections of a completion's tokens: use "
                "token"
            )
