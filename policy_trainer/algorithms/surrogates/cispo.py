"""CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4): REINFORCE, weighted by the truncated ratio, which has no gradient. Its
float64 twin is `cispo` in tests/policy_trainer/proofs/oracle.py."""

from typing import Any

from pydantic import Field

from policy_trainer.algorithms.surrogates.surrogate import Surrogate, SurrogateInputs, SurrogateLoss


class Cispo(Surrogate):
    ratio_max: float = Field(default=5.0, gt=0)
    """Upper bound of the ratio."""

    def loss(self, tokens: SurrogateInputs) -> SurrogateLoss:
        values = -tokens.ratio.detach().clamp(max=self.ratio_max) * tokens.advantages * tokens.logps
        return SurrogateLoss(values, clipped_high=tokens.ratio > self.ratio_max)

    def summary(self, loss: Any) -> str:
        return f", ratio to {self.ratio_max:g}"
