"""PPO's clipped surrogate (DeepSeekMath, arXiv 2402.03300, eq. 3), optionally with a separate upper bound (DAPO,
2503.14476) and dual clip (1912.09729). Its float64 twin is `clip` in tests/policy_trainer/proofs/oracle.py."""

from typing import Any, ClassVar

from policy_trainer.algorithms.surrogates.surrogate import Surrogate, SurrogateInputs, SurrogateLoss


class Clip(Surrogate):
    """Takes its bounds from loss.epsilon, loss.epsilon_high and loss.delta, which your own surrogate may read too."""

    has_two_bounds: ClassVar[bool] = True

    def loss(self, tokens: SurrogateInputs) -> SurrogateLoss:
        ratio, advantages, config = tokens.ratio, tokens.advantages, tokens.config
        low, high = 1 - config.epsilon, 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)
        bounded = ratio if config.delta is None else ratio.clamp(max=config.delta)
        values = -(bounded * advantages).minimum(ratio.clamp(low, high) * advantages)
        above = (ratio > high) & (advantages > 0)
        if config.delta is not None:
            above = above | ((ratio > config.delta) & (advantages < 0))
        return SurrogateLoss(values, (ratio < low) & (advantages < 0), above)

    def summary(self, loss: Any) -> str:
        return f" {loss.epsilon:g}" + ("" if loss.epsilon_high is None else f"/{loss.epsilon_high:g}")
