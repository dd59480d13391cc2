"""A bonus for the policy's entropy in the loss."""

from typing import Any

from pydantic import Field, model_validator

from policy_trainer.config.sections import Section


class EntropyConfig(Section):
    """The bonus adds -coef times the mean entropy of the tokens that train to the loss, so that the policy keeps
    exploring."""

    coef: float = Field(default=0.0, ge=0)
    """Coefficient of the bonus; with a target, the one that the run begins with."""
    target: float | None = Field(default=None, ge=0)
    """Nats a token: after each update the coefficient rises by delta where the entropy was at or below this, else it
    falls; there is a bonus only while it is at or below. Take about the metric `entropy` of the first steps. Default:
    the coefficient is fixed."""
    delta: float = Field(default=0.005, gt=0)
    """With a target: how far the coefficient moves after an update."""
    min: float = Field(default=0.0, ge=0)
    """With a target: least coefficient."""
    max: float = Field(default=1.0, ge=0)
    """With a target: largest coefficient."""

    @model_validator(mode="after")
    def _check_combinations(self) -> "EntropyConfig":
        if self.target is None:
            fields: dict[str, Any] = type(self).model_fields
            moved = [name for name in ("delta", "min", "max") if getattr(self, name) != fields[name].default]
            if moved:
                raise ValueError(f"loss.entropy.{moved[0]}: the coefficient is fixed without loss.entropy.target")
        elif self.min > self.max:
            raise ValueError("loss.entropy.min: must not be above loss.entropy.max")
        elif not self.min <= self.coef <= self.max:
            raise ValueError("loss.entropy.coef: must lie between loss.entropy.min and loss.entropy.max")
        return self
