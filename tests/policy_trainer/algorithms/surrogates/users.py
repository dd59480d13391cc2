"""A surrogate as users write them, with a metric of its own."""

from torch import Tensor

from policy_trainer.algorithms.surrogates import SurrogateInputs


def clipped(tokens: SurrogateInputs) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """The built-in clip."""
    result = tokens.config.clip.loss(tokens)
    assert result.clipped_low is not None and result.clipped_high is not None
    return result.values, result.clipped_low, result.clipped_high, {"clipped": result.clipped_low | result.clipped_high}
