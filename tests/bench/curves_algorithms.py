"""Algorithms of the curves that no preset has. Each is a loss; all else is the demo's."""

from collections.abc import Mapping
from dataclasses import dataclass

from policy_trainer.config import LossConfig


@dataclass(frozen=True)
class Algorithm:
    """minibatches: updates of a step. With several, the policy leaves the one that sampled: what bounds that acts."""

    loss: LossConfig
    minibatches: int = 4


ALGORITHMS: Mapping[str, Algorithm] = {
    "rloo": Algorithm(LossConfig(advantage="rloo", beta=0, old_logps="recomputed")),
    "sapo": Algorithm(LossConfig(surrogate="sapo", beta=0, old_logps="recomputed")),
    "tis": Algorithm(LossConfig(importance_sampling_correction="tis", beta=0, old_logps="recomputed")),
    "icepop": Algorithm(LossConfig(importance_sampling_correction="mask", beta=0, old_logps="recomputed")),
}
