"""The settings that workers elsewhere get from the trainer, with its published weights."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

# What decides which completions are sampled, and how they are judged. A worker takes no others, neither where it runs
# nor whom it talks to. Its model is the published one.
TRAVELLING = ("dtype", "seed", "task", "rewards", "reward_weights", "judging", "data", "sampling")


def worker_settings(config: BaseModel) -> dict[str, Any]:
    """As JSON. What is None is left out."""
    return json.loads(config.model_dump_json(include=set(TRAVELLING), exclude_none=True))


def taken(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of the settings that came, those that a worker takes."""
    return {name: settings[name] for name in TRAVELLING if name in settings}
