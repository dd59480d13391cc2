"""Algorithms of the curves that no preset has. Each is a loss; all else is the demo's."""

from collections.abc import Mapping
from dataclasses import dataclass

from policy_trainer.config import EntropyConfig, LossConfig, MaskConfig


@dataclass(frozen=True)
class Algorithm:
    """minibatches: updates of a step. With several, the policy leaves the one that sampled: what bounds that acts."""

    loss: LossConfig
    minibatches: int = 4


ALGORITHMS: Mapping[str, Algorithm] = {
    "rloo": Algorithm(LossConfig(advantage="rloo", beta=0, old_logps="recomputed")),
    "sapo": Algorithm(LossConfig(surrogate="sapo", beta=0, old_logps="recomputed")),
    "tis": Algorithm(LossConfig(importance_sampling_correction="tis", beta=0, old_logps="recomputed")),
    "gdpo": Algorithm(LossConfig(advantage="gdpo", beta=0, old_logps="recomputed")),
    "vespo": Algorithm(LossConfig(surrogate="vespo", aggregation="token_mean", beta=0, old_logps="recomputed")),
    "luspo": Algorithm(
        LossConfig(
            importance_sampling_level="sequence",
            epsilon=3e-4,
            epsilon_high=4e-4,
            aggregation="luspo",
            beta=0,
            old_logps="recomputed",
        )
    ),
    "icepop": Algorithm(LossConfig(importance_sampling_correction="mask", beta=0, old_logps="recomputed")),
    "log_linear": Algorithm(LossConfig(importance_sampling_correction="tis", beta=0, old_logps="log_linear")),
    "off_policy_sequence": Algorithm(LossConfig(mask=MaskConfig(off_policy_sequence=0.5), beta=0)),
    "geometric": Algorithm(LossConfig(mask=MaskConfig(geometric_low=0.5, geometric_high=2), beta=0)),
    # As verl and prime-rl have them: a mask in place of the clip, and a mean over tokens.
    "dppo": Algorithm(
        LossConfig(
            surrogate="cispo",
            ratio_max=20,
            mask=MaskConfig(dppo_low=0.15, dppo_high=0.15),
            aggregation="token_mean",
            beta=0,
        )
    ),
    "ipo": Algorithm(
        LossConfig(
            surrogate="cispo",
            ratio_max=20,
            mask=MaskConfig(ipo=0.1),
            mismatch_penalty=1e-3,
            aggregation="token_mean",
            beta=0,
        )
    ),
    "entropy_bonus": Algorithm(LossConfig(entropy=EntropyConfig(coef=0.01), beta=0, old_logps="recomputed")),
    # The base model begins at about this entropy.
    "adaptive_entropy": Algorithm(
        LossConfig(entropy=EntropyConfig(target=0.3, delta=0.001, max=0.05), beta=0, old_logps="recomputed")
    ),
    "top_entropy": Algorithm(LossConfig(top_entropy_quantile=0.2, beta=0, old_logps="recomputed")),
}
