"""Writes the tables of docs/presets.md from the presets: `.venv/bin/python -m tools.presets_page`."""

from pathlib import Path

from policy_trainer.config import LossConfig, TrainConfig
from policy_trainer.config.presets import PRESETS, Preset
from policy_trainer.config.presets.preset import SAMPLES_IN_TURN, kl, surrogate

PAGE = Path(__file__).parents[1] / "docs" / "presets.md"
BEGIN, END = "<!-- written by tools/presets_page.py: begin -->\n", "<!-- end -->\n"
_CHOICE = "| preset | what it is | data | reference |"
_NUMBERS = "| preset | group, sampling | surrogate; KL; aggregation; advantage | optimizer, cadence |"
_HOW_TO_READ = """\
`T` is the temperature. `old` is `loss.old_logps`: what the ratio compares the policy with. `clip 0.2/0.28` has a lower
and an upper bound; `sequences` and `sums` mean one ratio for a completion. `KL k3 0.04` is the estimator and
`loss.beta`. The last column has learning rate, weight decay, the bound of the gradient's norm, and updates."""
_SHOW = "`policy-trainer presets show NAME`"


def written(page: str) -> str:
    """The page, with the part between its markers rewritten."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{_tables()}{END}{after}"


def _tables() -> str:
    choice = _table(_CHOICE, [_choice(preset) for preset in PRESETS.values()])
    numbers = _table(_NUMBERS, [_numbers(preset) for preset in PRESETS.values()])
    departures = [line for preset in PRESETS.values() for line in _departures(preset)]
    others = ", ".join(preset.name for preset in PRESETS.values() if SAMPLES_IN_TURN not in preset.deviations)
    of_all = f"All but {others}: {SAMPLES_IN_TURN} What a recipe does not publish has our default: {_SHOW} lists it."
    lines = ["", "## Which there are", "", *choice, "", "## Their numbers", "", _HOW_TO_READ, "", *numbers, ""]
    return "\n".join([*lines, "## What is not as published", "", of_all, "", *departures, ""])


def _table(head: str, rows: list[str]) -> list[str]:
    return [head, "|" + "---|" * (head.count("|") - 1), *rows]


def _choice(preset: Preset) -> str:
    return f"| `{preset.name}` | {preset.summary} | {preset.data} | {_reference(preset.config())} |"


def _numbers(preset: Preset) -> str:
    config = preset.config()
    loss = config.loss
    cells = (
        f"`{preset.name}`",
        _sampling(config),
        f"{surrogate(loss)}, old {loss.old_logps}; KL {kl(loss)}; {loss.aggregation}; {_advantage(loss)}",
        _cadence(config),
    )
    return f"| {' | '.join(cells)} |"


def _advantage(loss: LossConfig) -> str:
    if loss.advantage == "distill":
        return f"distill {loss.distillation:g}"
    if loss.scale == "none":
        return loss.advantage
    return f"{loss.advantage}, {loss.advantage_std} std + {loss.advantage_eps:g}"


def _sampling(config: TrainConfig) -> str:
    section = config.sampling
    words = [f"{section.num_generations} a group", f"T {section.temperature:g}"]
    words += [f"top_p {section.top_p:g}"] if section.top_p < 1 else []
    words += [f"{section.max_completion_length} tokens", f"{config.groups_per_step} prompts a step"]
    return ", ".join(words)


def _cadence(config: TrainConfig) -> str:
    section, updates = config.optimizer, config.num_iterations * config.minibatches
    words = [f"{section.learning_rate:g}" + (" cosine" if section.lr_scheduler_type == "cosine" else "")]
    words += [f"decay {section.weight_decay:g}"] if section.weight_decay else []
    words += [f"norm {section.max_grad_norm:g}" if section.max_grad_norm else "no norm clip"]
    words += [f"{updates} updates a step" if updates > 1 else "1 update a step"]
    words += [f"published every {config.publish_every} steps"] if config.publish_every > 1 else []
    return ", ".join(words)


def _reference(config: TrainConfig) -> str:
    if not config.loss.beta:
        return "none"
    every = config.reference.sync_steps
    return f"the policy, every {every} steps" if every else "fixed"


def _departures(preset: Preset) -> list[str]:
    single = [f"`{name}`: {setting.deviation}" for name, setting in preset.settings.items() if setting.deviation]
    wants = [f"Wants `{name}`: {what}." for name, what in preset.wants.items()]
    items = [*single, *(line for line in preset.deviations if line != SAMPLES_IN_TURN), *wants]
    return [f"**`{preset.name}`**, {preset.origin}", *(f"- {item}" for item in items), ""]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
