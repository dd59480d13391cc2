"""The settings that workers elsewhere get from the trainer, with its published weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policy_trainer.config.commands import RunConfig

# What decides which completions are sampled, and how they are judged. A worker takes no others, neither where it runs
# nor whom it talks to. Its model is the published one.
TRAVELLING = ("dtype", "seed", "task", "rewards", "reward_weights", "judging", "data", "sampling", "lora", "loss")
# Of the loss, this alone.
LOSS = {"advantage"}
# And where adapters are published: the model that they are for.
BASE = ("model", "revision")


def worker_settings(config: RunConfig) -> dict[str, Any]:
    """As JSON. What is None is left out."""
    names: dict[str, Any] = {**dict.fromkeys((*TRAVELLING, *BASE), True), "loss": LOSS}
    settings = json.loads(config.model_dump_json(include=names, exclude_none=True))
    if Path(config.model).is_dir():
        settings["model"] = str(Path(config.model).resolve())
    return taken(settings)


def taken(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of the settings that came, those that a worker takes."""
    names = (*TRAVELLING, *BASE) if trains_adapters(settings) else TRAVELLING
    return {name: settings[name] for name in names if name in settings}


def trains_adapters(settings: Mapping[str, Any]) -> bool:
    lora = settings.get("lora")
    return isinstance(lora, Mapping) and bool(lora.get("rank"))
