"""Writes the tables of docs/presets.md from the presets: `.venv/bin/python -m tests.presets_page`."""

from pathlib import Path

from policy_trainer.presets import PRESETS, Preset
from policy_trainer.presets import descriptions as say
from policy_trainer.presets.preset import SAMPLES_IN_TURN

PAGE = Path(__file__).parents[1] / "docs" / "presets.md"
BEGIN, END = "<!-- written by tests/presets_page.py: begin -->\n", "<!-- end -->\n"
_HEAD = "| preset | data | group, sampling | surrogate; KL; aggregation; advantage | optimizer, cadence | reference |"


def written(page: str) -> str:
    """The page, with the part between its markers rewritten."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{_tables()}{END}{after}"


def _tables() -> str:
    rows = [_HEAD, "|" + "---|" * (_HEAD.count("|") - 1), *(_row(preset) for preset in PRESETS.values())]
    departures = [line for preset in PRESETS.values() for line in _departures(preset)]
    others = ", ".join(preset.name for preset in PRESETS.values() if SAMPLES_IN_TURN not in preset.deviations)
    of_all = f"All but {others}: {SAMPLES_IN_TURN}"
    return "\n".join(["", *rows, "", "## What is not as published", "", of_all, "", *departures, ""])


def _row(preset: Preset) -> str:
    config = preset.config()
    loss = config.loss
    cells = (
        f"`{preset.name}`",
        preset.data,
        say.sampling(config),
        f"{say.surrogate(loss)}, old {loss.old_logps}; KL {say.kl(loss)}; {loss.aggregation}; {say.advantage(loss)}",
        say.cadence(config),
        say.reference(config),
    )
    return f"| {' | '.join(cells)} |"


def _departures(preset: Preset) -> list[str]:
    single = [f"`{name}`: {setting.deviation}" for name, setting in preset.settings.items() if setting.deviation]
    unpublished = ", ".join(f"`{name}`" for name in preset.unpublished)
    other = [f"Not published, so our default is used: {unpublished}."] if unpublished else []
    wants = [f"Wants `{name}`: {what}." for name, what in preset.wants.items()]
    items = [*single, *(line for line in preset.deviations if line != SAMPLES_IN_TURN), *other, *wants]
    return [f"**`{preset.name}`**, {preset.origin}", *(f"- {item}" for item in items), ""]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
