"""Settings of published recipes: one TOML file each, in this folder."""

from collections.abc import Mapping
from pathlib import Path

from policy_trainer.config.presets.preset import Preset, Setting, read_preset
from shared.settings import PresetSettings

__all__ = ["PRESETS", "SETTINGS", "Preset", "Setting"]

_FILES = sorted(Path(__file__).parent.glob("*.toml"), key=lambda path: path.stem)
PRESETS: Mapping[str, Preset] = {path.stem: read_preset(path) for path in _FILES}
# Their values, in the form that `load_settings` takes.
SETTINGS: Mapping[str, PresetSettings] = {name: preset.values_with for name, preset in PRESETS.items()}
