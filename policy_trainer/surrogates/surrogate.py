"""What a surrogate is: its settings, its formula, and what others must know about it.

The settings of every command import these files, and need no PyTorch: a file imports it where it computes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from shared.settings import Section

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SurrogateInputs:
    """Per token, (C,); floating point unless said otherwise, and 0 where masked.

    logps: log-probs of the current policy, with a gradient. old_logps: by loss.old_logps, without one. ratio: exp(logps
    - old_logps) at loss.importance_sampling_level, with a gradient. mask: bool, tokens that train. sequence_ids: int64,
    the completion of each token, counted through the micro-batch. ref_logps: None without a reference. sampler_logps:
    NaN or None where unknown. importance_weights: of loss.importance_sampling_correction, or None. config: LossConfig,
    the settings of `loss`.
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
    """Per token, (C,). values: what is minimised. clipped_low, clipped_high: bool, where the lower and the upper bound
    removed the gradient, or truncated a weight; None for nowhere. metrics: numbers or bools by the name of a metric,
    which is their mean over the tokens that train."""

    values: "Tensor"
    clipped_low: "Tensor | None" = None
    clipped_high: "Tensor | None" = None
    metrics: "Mapping[str, Tensor]" = field(default_factory=dict)


class Surrogate(Section):
    """The settings of a surrogate, which are the table `loss.NAME`. One without settings has an empty table."""

    has_two_bounds: ClassVar[bool] = False
    """Whether it clips the ratio from below and above, so that a clip ratio of 0 means that the clip is idle."""
    weighs_completions: ClassVar[bool] = False
    """Whether it weighs whole completions by their tokens' ratios and importance weights. Then the importance weights
    are not applied again, loss.importance_sampling_level does not matter, and loss.aggregation must be token_mean."""

    def loss(self, tokens: SurrogateInputs) -> SurrogateLoss:
        raise NotImplementedError

    def summary(self, loss: Any) -> str:
        """The settings that differ between recipes, in a few characters. loss: LossConfig."""
        return ""
