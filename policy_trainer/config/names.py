"""The commands with their settings, and the names that other programs give these settings.

Error messages, docs/coming-from-trl.md and `policy_trainer.trl` read the names. Those of TRL are in trl.toml.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from policy_trainer.config.commands import DemoConfig, DemoSetupConfig, EvalConfig, ExportConfig, RolloutConfig
from policy_trainer.config.supervised import RewardTrainingConfig, SftConfig
from policy_trainer.config.train import DoctorConfig, ReplayConfig, TrainConfig
from shared.settings import Hints

COMMANDS: Mapping[str, type[BaseModel]] = {
    "train": TrainConfig,
    "doctor": DoctorConfig,
    "replay": ReplayConfig,
    "rollout": RolloutConfig,
    "eval": EvalConfig,
    "sft": SftConfig,
    "reward-model": RewardTrainingConfig,
    "export": ExportConfig,
    "demo": DemoConfig,
    "demo-setup": DemoSetupConfig,
}

_TABLE: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    Path(__file__).with_name("trl.toml").read_text(encoding="utf-8")
)
# By section: TRL's name -> "our names | a note", or a mark of NO_SETTING and why there is none.
TRL: Mapping[str, Mapping[str, str]] = {
    title: entries for title, entries in _TABLE.items() if title not in ("Metrics", "defaults", "types")
}
# Of all sections: TRL's name -> our names, or a mark of NO_SETTING; and the note.
TRL_ENTRIES: Mapping[str, tuple[str, ...]] = {
    name: entry.partition(" | ")[::2] for section in TRL.values() for name, entry in section.items()
}
# TRL's metrics -> ours, and the note.
TRL_METRICS: Mapping[str, tuple[str, ...]] = {
    name: entry.partition(" | ")[::2] for name, entry in _TABLE["Metrics"].items()
}
# TRL's own value of each field of GRPOConfig.
TRL_DEFAULTS: Mapping[str, Any] = {
    name: None if value == "None" else value for name, value in _TABLE["defaults"].items()
}
# Fields of GRPOConfig whose type does not follow from the default -> the type, as written in Python.
TRL_TYPES: Mapping[str, str] = {name: kind for kind, names in _TABLE["types"].items() for name in names.split()}
# `*`: the result does not depend on it, so that policy_trainer.trl takes any value.
NO_SETTING = ("-", "*")

# A name in another program -> ours.
RENAMED: Mapping[str, tuple[str, ...]] = {
    **{name: tuple(ours.split()) for name, (ours, _) in TRL_ENTRIES.items() if ours not in (*NO_SETTING, name)},
    "torch_dtype": ("dtype",),
    "chat_template_path": ("data.chat_template",),
    "lr": ("optimizer.learning_rate",),
    "kl_coef": ("loss.beta",),
    "kl_beta": ("loss.beta",),
    "max_new_tokens": ("sampling.max_completion_length",),
    "max_tokens": ("sampling.max_completion_length", "max_length"),
    "group_size": ("sampling.num_generations",),
}

# A name that is no setting -> why not, and what to do instead: names in TRL, and --dry-run of many programs.
ABSENT: Mapping[str, str] = {
    **{name: note for name, (ours, note) in TRL_ENTRIES.items() if ours in NO_SETTING},
    "dry_run": "`policy-trainer doctor` takes one group through everything, and keeps nothing",
}

HINTS = Hints(COMMANDS, RENAMED, ABSENT)
