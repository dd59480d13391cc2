"""VESPO (arXiv 2602.10693): REINFORCE, weighted by a smooth function of the completion's ratio. Its float64 twin is
`vespo` in tests/policy_trainer/proofs/oracle.py."""

import math
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from policy_trainer.algorithms.surrogates.surrogate import Surrogate, SurrogateInputs, SurrogateLoss

if TYPE_CHECKING:
    from torch import Tensor

# Bounds of a token's log-ratio and of a completion's weight, as in the paper's code and in TRL.
_MAX_TOKEN_LOG_RATIO = 20.0
_MIN_WEIGHT, _MAX_LOG_WEIGHT = 1e-8, 20.0


class Vespo(Surrogate):
    weighs_completions: ClassVar[bool] = True

    k_pos: float = Field(default=2.0, ge=0)
    """Power of the ratio of a completion, for advantages of 0 or more; a larger one trains less on completions that
    have become less likely."""
    lambda_pos: float = Field(default=3.0, gt=0)
    """Rate of the decay, for advantages of 0 or more; a larger one trains less on completions that have become more
    likely."""
    k_neg: float = Field(default=3.0, ge=0)
    """k_pos for negative advantages."""
    lambda_neg: float = Field(default=2.0, gt=0)
    """lambda_pos for negative advantages."""

    def loss(self, tokens: SurrogateInputs) -> SurrogateLoss:
        return SurrogateLoss(-tokens.advantages * tokens.logps * self._weights(tokens))

    def _weights(self, tokens: SurrogateInputs) -> "Tensor":
        """Returns the weight of each token, (C,), without a gradient: exp(lambda + k S - lambda e^S). It is 1 at S = 0,
        and small for completions that have become much more or much less likely. k and lambda depend on the advantage's
        sign.

        S is the sum of l - l_old over a completion's tokens, plus the sum of the logs of their importance weights.
        """
        import torch

        from policy_trainer.algorithms.surrogates.sums import masked, sequence_sums

        difference = tokens.logps.detach() - tokens.old_logps
        log_ratios = difference.clamp(-_MAX_TOKEN_LOG_RATIO, _MAX_TOKEN_LOG_RATIO)
        if tokens.importance_weights is not None:
            # A weight may be 0, which has no logarithm.
            log_ratios = log_ratios + tokens.importance_weights.clamp(min=_MIN_WEIGHT).log().clamp(max=_MAX_LOG_WEIGHT)
        log_weight = sequence_sums(masked(log_ratios, tokens.mask), tokens.sequence_ids)[tokens.sequence_ids]
        log_weight = log_weight.clamp(math.log(_MIN_WEIGHT), _MAX_LOG_WEIGHT)
        gains = tokens.advantages >= 0
        k = torch.where(gains, self.k_pos, self.k_neg)
        decay = torch.where(gains, self.lambda_pos, self.lambda_neg)
        return (decay + k * log_weight - decay * log_weight.exp()).exp().to(difference.dtype)

    def summary(self, loss: Any) -> str:
        return f", {self.k_pos:g}:{self.lambda_pos:g}/{self.k_neg:g}:{self.lambda_neg:g}"
