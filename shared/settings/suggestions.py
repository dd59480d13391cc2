"""What to say about a name that is not a setting: whose it is, or which setting was probably meant."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from pydantic import BaseModel

from shared.settings.names import setting_names

# How a source writes a dotted name: `loss.beta` is `--loss.beta` or POLICY_TRAINER_LOSS__BETA.
Spell = Callable[[str], str]

_SUGGESTIONS = 3


@dataclass(frozen=True)
class Hints:
    """What a program knows about names that are not settings of the command at hand.

    commands: each command's settings. renamed: names in another program -> ours, dotted. absent: names in another
    program -> why there is none here, and what to do instead. listed: where all settings are.
    """

    commands: Mapping[str, type[BaseModel]] = field(default_factory=dict)
    renamed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    listed: str = "--help-all lists all"


NO_HINTS = Hints()


def explain_unknown(name: str, known: list[str], hints: Hints, spell: Spell) -> str:
    """The end of a sentence about a dotted name that is none of the known ones."""
    # Another program's `lora_dropout` and `use_dora` are also looked for as our `lora.dropout` and `lora.use_dora`.
    spellings = dict.fromkeys((name, name.replace(".", "_"), _last(name)))
    if absent := [hints.absent[spelled] for spelled in spellings if spelled in hints.absent]:
        return absent[0]
    owners = [f"`{command}`" for command, other in hints.commands.items() if name in setting_names(other)]
    renamed = [ours for spelled in spellings for ours in hints.renamed.get(spelled, ()) if ours in known]
    meant = renamed or _namesakes(name, known) or ([] if owners else _similar(name, known))
    told = [f"it belongs to {', '.join(owners)}"] if owners else []
    told += [_did_you_mean(meant, spell)] if meant else []
    return "; ".join(told) or hints.listed


def _namesakes(name: str, known: list[str]) -> list[str]:
    """Settings of the same name in other groups."""
    if name in known:  # written with the wrong dashes
        return [name]
    return [other for other in known if _last(other) == _last(name)][:_SUGGESTIONS]


def _similar(name: str, known: list[str]) -> list[str]:
    """The setting of a similar name, or those of a similar name in other groups."""
    if near := get_close_matches(name, known, n=1):
        return near
    last = get_close_matches(_last(name), {_last(other) for other in known}, n=1)
    return [other for other in known if _last(other) in last][:_SUGGESTIONS]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _did_you_mean(names: list[str], spell: Spell) -> str:
    *others, last = (spell(name) for name in names)
    return f"did you mean {' or '.join([', '.join(others), last] if others else [last])}?"
