"""Names that other programs give to settings, for users who type them out of habit.

trl.toml has TRL's names. docs/coming-from-trl.md is generated from it; a test compares it with the installed TRL.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path

# By section: TRL's name -> "our names | a note", or "- | why there is none".
TRL: Mapping[str, Mapping[str, str]] = tomllib.loads(Path(__file__).with_name("trl.toml").read_text(encoding="utf-8"))
_ENTRIES = {name: entry.partition(" | ") for section in TRL.values() for name, entry in section.items()}

# A name in another program -> ours.
RENAMED: Mapping[str, tuple[str, ...]] = {
    **{name: tuple(ours.split()) for name, (ours, _, _) in _ENTRIES.items() if ours not in ("-", name)},
    "torch_dtype": ("dtype",),
    "lr": ("optimizer.learning_rate",),
    "kl_coef": ("loss.beta",),
    "kl_beta": ("loss.beta",),
    "max_new_tokens": ("sampling.max_completion_length",),
    "max_tokens": ("sampling.max_completion_length", "max_length"),
    "group_size": ("sampling.num_generations",),
}

# A name in TRL -> why there is nothing like it, and what to do instead.
ABSENT: Mapping[str, str] = {name: note for name, (ours, _, note) in _ENTRIES.items() if ours == "-"}
