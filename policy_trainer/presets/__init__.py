"""Settings of published recipes: every number with its source, every deviation as data."""

from collections.abc import Mapping

from policy_trainer.presets.deepseek_math import DEEPSEEK_MATH, DEEPSEEK_MATH_PROCESS
from policy_trainer.presets.papers import CISPO, DAPO, DR_GRPO, GSPO, GUIDE, REINFORCE_PLUS_PLUS
from policy_trainer.presets.preset import Number, Preset
from policy_trainer.presets.repositories import GRPO_ZERO, LM_BOOK, NANO_AHA_MOMENT, OPEN_R1, SIMPLE_GRPO
from shared.settings import SettingsBeside

__all__ = ["PRESETS", "SETTINGS", "Number", "Preset"]

_IN_ORDER = (
    SIMPLE_GRPO,
    NANO_AHA_MOMENT,
    GRPO_ZERO,
    LM_BOOK,
    OPEN_R1,
    DEEPSEEK_MATH,
    DEEPSEEK_MATH_PROCESS,
    GUIDE,
    DAPO,
    DR_GRPO,
    GSPO,
    CISPO,
    REINFORCE_PLUS_PLUS,
)
PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _IN_ORDER}
# The same for settings to be read from.
SETTINGS: Mapping[str, SettingsBeside] = {name: preset.beside for name, preset in PRESETS.items()}
