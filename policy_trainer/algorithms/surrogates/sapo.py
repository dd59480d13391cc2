"""SAPO (arXiv 2511.20347): a soft gate on the ratio instead of a clip; it closes sooner for negative advantages. Its
float64 twin is `sapo` in tests/policy_trainer/proofs/oracle.py."""

from typing import Any

from pydantic import Field

from policy_trainer.algorithms.surrogates.surrogate import Surrogate, SurrogateInputs, SurrogateLoss


class Sapo(Surrogate):
    temperature_pos: float = Field(default=1.0, gt=0)
    """Temperature of the gate for positive advantages; higher closes it more sharply."""
    temperature_neg: float = Field(default=1.05, gt=0)
    """Temperature of the gate for all other advantages."""

    def loss(self, tokens: SurrogateInputs) -> SurrogateLoss:
        ratio, advantages = tokens.ratio, tokens.advantages
        tau = ratio.new_full(ratio.shape, self.temperature_neg).masked_fill(advantages > 0, self.temperature_pos)
        return SurrogateLoss(-(4 / tau) * (tau * (ratio - 1)).sigmoid() * advantages)

    def summary(self, loss: Any) -> str:
        return f", tau {self.temperature_pos:g}/{self.temperature_neg:g}"
