"""Settings of the loss that make no sense together are refused with the field's name and a remedy."""

from typing import Any

import pytest
from pydantic import ValidationError

from policy_trainer.config import LossConfig


@pytest.mark.parametrize(
    ("settings", "field", "remedy"),
    [
        ({"advantage": "dr_grpo", "advantage_scale": "group"}, "advantage_scale", "advantage = outcome"),
        ({"advantage": "dr_grpo", "advantage_scale": "batch"}, "advantage_scale", "advantage = outcome"),
        ({"advantage": "reinforce++", "kl_in": "reward", "advantage_scale": "group"}, "advantage_scale", "take batch"),
        ({"advantage": "reinforce++"}, "kl_in", "take reward"),
        ({"advantage": "process", "kl_in": "reward"}, "kl_in", "take loss"),
        ({"advantage": "process", "kl_in": "both"}, "kl_in", "take loss"),
        ({"beta": 0, "kl_in": "reward"}, "kl_in", "raise beta"),
        ({"beta": 0, "kl_in": "both"}, "kl_in", "raise beta"),
        ({"kl_in": "reward", "kl_weight": "ratio"}, "kl_weight", "take both"),
        ({"dual_clip": 1.2}, "dual_clip", "above the upper bound of the ratio, 1.2,"),
        ({"dual_clip": 1.5, "clip_high": 0.6}, "dual_clip", "above the upper bound of the ratio, 1.6,"),
        ({"correction": "tis"}, "correction", "old_logps = recomputed"),
        ({"correction": "mask", "old_logps": "current"}, "correction", "old_logps = recomputed"),
        ({"correction_low": 3, "correction_high": 2}, "correction_low", "above loss.correction_high"),
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
        {"advantage": "dr_grpo", "advantage_scale": "none"},
        {"advantage": "rloo", "advantage_scale": "batch"},
        {"advantage": "reinforce++", "beta": 0},
        {"advantage": "reinforce++", "kl_in": "both", "advantage_scale": "none"},
        {"advantage": "process", "advantage_scale": "batch"},
        {"kl_in": "both", "kl_weight": "ratio"},
        {"old_logps": "current", "kl_weight": "ratio"},
        {"dual_clip": 3.0, "clip_high": 0.28},
        {"surrogate": "reinforce", "ratio": "sequence", "clip": 0.1},
        {"correction": "mask", "old_logps": "recomputed", "correction_level": "sequence"},
    ],
)
def test_accepted(settings: dict[str, Any]) -> None:
    LossConfig.model_validate(settings)
