"""The interface of a surrogate: its settings, its formula, and what the rest of the program must know about it.

The settings of every command import the files of this package, but need no PyTorch: import it inside the function that
uses it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from shared.settings import Section

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SurrogateInputs:
    """The inputs of a surrogate: one value per token, (C,), floating point unless stated otherwise.

    logps: log-probs under the current policy, with a gradient. old_logps: log-probs in the denominator of the ratio,
    which loss.old_logps chooses, without a gradient. ratio: exp(logps - old_logps) at loss.importance_sampling_level,
    with a gradient. mask: bool, tokens that train. sequence_ids: int64, the index of the token's completion in the
    micro-batch. ref_logps: log-probs under the reference; None without one. sampler_logps: log-probs under the sampler;
    NaN or None where unknown. importance_weights: weights of loss.importance_sampling_correction; None without it.
    config: the settings under `loss`, a LossConfig.

    Where masked, logps, old_logps, advantages and ref_logps are 0, and ratio is 1; sampler_logps and importance_weights
    may have any value there.
    """

    logps: "Tensor"
    old_logps: "Tensor"
    ratio: "Tensor"
    advantages: "Tensor"
    mask: "Tensor"
    sequence_ids: "Tensor"
    ref_logps: "Tensor | None"
    sampler_logps: "Tensor | None"
    importance_weights: "Tensor | None"
    config: Any


@dataclass(frozen=True)
class SurrogateLoss:
    """What a surrogate returns: one value per token, (C,).

    values: the loss, which is minimised. clipped_low, clipped_high: bool, True where the lower or the upper bound
    removed the gradient or truncated a weight; None if there is no such bound. metrics: numbers or bools by the
    metric's name. What is logged is their mean over the tokens that train.
    """

    values: "Tensor"
    clipped_low: "Tensor | None" = None
    clipped_high: "Tensor | None" = None
    metrics: "Mapping[str, Tensor]" = field(default_factory=dict)


class Surrogate(Section):
    """Base class of surrogates. Its fields are the settings in the table `loss.NAME`; there may be none."""

    has_two_bounds: ClassVar[bool] = False
    """Whether it clips the ratio from below and above: then a clip_ratio of 0 means that the clip has no effect."""
    weighs_completions: ClassVar[bool] = False
    """Whether it weights whole completions by their tokens' ratios and importance weights. Then the importance weights
    are not applied again, loss.importance_sampling_level has no effect, and loss.aggregation must be token_mean."""

    def loss(self, tokens: SurrogateInputs) -> SurrogateLoss:
        raise NotImplementedError

    def summary(self, loss: Any) -> str:
        """Returns the settings that differ between recipes, as a short suffix to the surrogate's name. It begins with a
        comma or a space. loss: a LossConfig."""
        return ""
