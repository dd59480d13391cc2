"""Settings of a command, from a preset, the run's config.toml, one TOML file, the environment and the command line.

Later ones override. One pydantic model describes them all. Unknown names and invalid values are refused with the
setting's name and, where there is one, the name that was probably meant.
"""

from shared.settings.files import EarlierRun, FindEarlier
from shared.settings.load import (
    Dtype,
    PresetSettings,
    PresetSource,
    Section,
    Settings,
    from_python,
    from_values,
    load_settings,
    settings_config,
)
from shared.settings.names import Hints, InHelp, Verbatim
