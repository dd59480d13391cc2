"""The card of a trained model, in the Hub's form: Markdown behind a block of metadata."""

import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tomli_w

from policy_trainer.reporting.metrics import Metrics
from policy_trainer.reporting.report.run import RecordedRun, number
from policy_trainer.reporting.report.story import figure
from policy_trainer.reporting.report.viewer import spread
from shared.settings.names import nested_settings

# Rows of the table of training steps, and of that of evaluations.
_STEPS = 12
# Where a run was, which says nothing about its model.
_PLACES = ("run_dir", "run", "server", "report_to", "show_samples")
_USE = """
```python
from transformers import pipeline

generator = pipeline("text-generation", model="{repository}")
question = "What is 12 times 12?"
print(generator([{{"role": "user", "content": question}}], max_new_tokens=128, return_full_text=False)[0])
```
"""


def model_card(
    name: str,
    introduction: str,
    run: RecordedRun | None,
    *,
    base: str | None,
    dataset: str | None = None,
    tags: Sequence[str] = (),
    adapters: bool = False,
    repository: str | None = None,
    curves: str | None = None,
) -> str:
    """Returns README.md. base: the model that was trained; in the metadata only if it is a Hub id. run: `public`.
    curves: the name of a picture in the same directory."""
    from huggingface_hub import ModelCardData

    command = run.settings.command if run else "train"
    data = ModelCardData(
        base_model=base if base and is_hub_id(base) else None,
        datasets=dataset,
        library_name="peft" if adapters else "transformers",
        model_name=name,
        tags=[
            "generated_from_trainer",
            *(["grpo"] if command == "train" else []),
            "tandem",
            *tags,
        ],
    )
    versions = ", ".join(f"{package} {version(package)}" for package in ("transformers", "torch", "datasets"))
    parts = [
        f"---\n{data.to_yaml()}\n---\n\n# {name}\n\n",
        f"{introduction}\n",
        "" if command == "reward-model" else _USE.format(repository=repository or name),
        f"\n![Curves of the run]({curves})\n" if curves else "",
        *(_sections(run) if run else ()),
        f"\nVersions: {versions}.\n",
    ]
    return "".join(parts)


def _sections(run: RecordedRun) -> Sequence[str]:
    evaluations = {
        "step": "step", "decoding": "decoding", "problems": "problems", "accuracy": "accuracy", "low": "95% from",
        "high": "to", "reward": "reward", "eval_loss": "loss",
    }  # fmt: skip
    steps = {
        "step": "step", "completions_total": "completions", "reward": "reward", "kl": "KL", "entropy": "entropy",
        "completion_length_mean": "completion length",
    } if run.settings.command == "train" else {"step": "step", "loss": "loss"}  # fmt: skip
    settings = nested_settings(run.settings.differing)
    return [
        _table("Evaluations on held-out problems", run.evaluations, evaluations),
        _table("Training", run.steps, steps),
        f"\n## Settings that are not the defaults\n\n```toml\n{tomli_w.dumps(settings)}```\n" if settings else "",
    ]


def _table(title: str, records: Sequence[Metrics], columns: dict[str, str]) -> str:
    """A Markdown table of some of the records, from the first to the last; empty without any."""
    shown = spread(list(records), _STEPS)
    columns = {name: label for name, label in columns.items() if any(name in record for record in shown)}
    if not shown:
        return ""
    rows = [
        list(columns.values()),
        ["---"] * len(columns),
        *([_cell(record, name) for name in columns] for record in shown),
    ]
    return f"\n## {title}\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(record: Metrics, name: str) -> str:
    value = record.get(name)
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return figure(number(record, name)) if math.isfinite(number(record, name)) else ""


def is_hub_id(model: str) -> bool:
    """Whether a model's name is a Hub id, such as Qwen/Qwen3-0.6B, rather than a path."""
    return model.count("/") <= 1 and not model.startswith((".", "/", "~")) and not Path(model).is_dir()


def public(run: RecordedRun) -> RecordedRun:
    """The run as everybody may see it: its settings without where it was, the directories of absolute paths, and
    addresses."""
    given = {name: _shortened(value) for name, value in run.settings.given.items() if name not in _PLACES}
    return replace(run, settings=replace(run.settings, given=given))


def _shortened(value: Any) -> Any:
    """Without the directories of an absolute path, and of an address only its scheme."""
    if isinstance(value, list):
        return [_shortened(each) for each in value]
    if isinstance(value, dict):
        return {name: _shortened(each) for name, each in value.items()}
    if isinstance(value, str) and "://" in value:
        return value.partition("://")[0] + "://…"
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
