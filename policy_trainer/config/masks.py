"""Trust regions: which tokens lose their surrogate because policy and sampler have moved apart."""

from pydantic import Field, model_validator

from policy_trainer.config.sections import Section


class MaskConfig(Section):
    """Tokens outside of these bounds lose their surrogate, but keep their KL and still count as tokens. Each is off
    without a bound. They compare the current policy with the sampler, and several may be on."""

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
