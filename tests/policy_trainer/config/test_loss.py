"""Settings of the loss that make no sense together are refused with the field's name and a remedy."""

from typing import Any

import pytest
from pydantic import ValidationError

from policy_trainer.config import LossConfig


@pytest.mark.parametrize(
    ("settings", "field", "remedy"),
    [
        ({"advantage": "dr_grpo", "scale_rewards": "group"}, "scale_rewards", "advantage = outcome"),
        (
            {"advantage": "reinforce++", "kl_in": "reward", "scale_rewards": "group"},
            "scale_rewards",
            "must be batch or none",
        ),
        ({"advantage": "reinforce++"}, "kl_in", "use reward"),
        ({"advantage": "process", "kl_in": "reward"}, "kl_in", "use loss"),
        ({"advantage": "gdpo", "scale_rewards": "group"}, "scale_rewards", "leave it out"),
        ({"advantage": "gdpo", "kl_in": "reward"}, "kl_in", "use loss"),
        ({"beta": 0, "kl_in": "reward"}, "kl_in", "raise beta"),
        ({"kl_in": "reward", "kl_weight": "ratio"}, "kl_weight", "use both"),
        ({"delta": 1.2}, "delta", "above the upper clipping bound of the ratio, 1.2,"),
        ({"delta": 1.5, "epsilon_high": 0.6}, "delta", "above the upper clipping bound of the ratio, 1.6,"),
        ({"old_logps": "log_linear", "kl_in": "reward"}, "kl_in", "old_logps = recomputed"),
        ({"importance_sampling_correction": "tis"}, "importance_sampling_correction", "old_logps = recomputed"),
        ({"surrogate": "vespo"}, "aggregation", "use token_mean"),
        (
            {
                "surrogate": "vespo",
                "aggregation": "token_mean",
                "old_logps": "recomputed",
                "importance_sampling_correction": "mask",
                "correction_level": "sequence",
            },
            "correction_level",
            "use token",
        ),
        ({"correction_low": 3, "correction_high": 2}, "correction_low", "above loss.correction_high"),
        ({"correction_min": 0.5}, "correction_min", "use loss.correction_low"),
        (
            {"importance_sampling_correction": "tis", "old_logps": "recomputed", "correction_min": 2},
            "correction_min",
            "below loss.correction_max, 2",
        ),
        ({"entropy": {"delta": 0.1}}, "entropy.delta", "fixed without loss.entropy.target"),
        ({"entropy": {"target": 1, "min": 0.2, "max": 0.1}}, "entropy.min", "above loss.entropy.max"),
        ({"entropy": {"target": 1, "coef": 0.2, "max": 0.1}}, "entropy.coef", "between loss.entropy.min"),
        ({"mask": {"geometric_low": 2, "geometric_high": 1}}, "mask.geometric_low", "above loss.mask.geometric_high"),
        ({"advantage": "distill", "distillation_coef": 0}, "distillation_coef", "raise it"),
        ({"advantage": "distill", "scale_rewards": "batch"}, "scale_rewards", "leave it out"),
        ({"advantage": "distill", "kl_in": "reward"}, "kl_in", "use loss"),
        ({"advantage": "maxrl", "kl_in": "reward"}, "kl_in", "use loss"),
        ({"advantage": "maxrl", "scale_rewards": "batch"}, "scale_rewards", "outcome or process or rloo"),
        ({"settings": {"limit": 1}}, "settings", "your own surrogate or advantage"),
    ],
)
def test_refused(settings: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(ValidationError) as refused:
        LossConfig.model_validate(settings)
    words = str(refused.value)
    assert f"loss.{field}: " in words and remedy in words


@pytest.mark.parametrize(
    "settings",
    [
        {"advantage": "dr_grpo", "scale_rewards": "none"},
        {"advantage": "reinforce++", "beta": 0},
        {"advantage": "reinforce++", "kl_in": "both", "scale_rewards": "none"},
        {"advantage": "gdpo", "scale_rewards": "batch"},
        {"kl_in": "both", "kl_weight": "ratio"},
        {"delta": 3.0, "epsilon_high": 0.28},
        {"mask": {"geometric_low": 1, "geometric_high": 1, "ipo": 0.1, "dppo_low": 0.2, "off_policy_sequence": 0.5}},
        {"entropy": {"coef": 0.01, "target": 1.5, "delta": 0.01, "min": 0.01, "max": 0.1}, "top_entropy_quantile": 0},
        {"importance_sampling_correction": "mask", "old_logps": "recomputed", "correction_level": "sequence"},
        {"importance_sampling_correction": "tis", "old_logps": "log_linear"},
        {"advantage": "distill", "scale_rewards": "none", "beta": 0.1},
        {"advantage": "process", "distillation_coef": 0.1},
    ],
)
def test_accepted(settings: dict[str, Any]) -> None:
    LossConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("settings", "coefficient"),
    [({}, 0.0), ({"advantage": "distill"}, 1.0), ({"distillation_coef": 0.3}, 0.3),
     ({"advantage": "distill", "distillation_coef": 0.3}, 0.3)],
)  # fmt: skip
def test_a_teacher_counts_once_where_there_are_no_rewards(settings: dict[str, Any], coefficient: float) -> None:
    loss = LossConfig.model_validate(settings)
    assert loss.distillation == coefficient
    assert loss.needs_variance == (coefficient == 0)
