"""Models for the servers and trainers of tests."""

from pathlib import Path

from policy_trainer.cli.demo.base_model import make_model, make_tokenizer
from shared.models import save_model


def tiny_model(directory: Path) -> Path:
    """The demo's architecture with random weights, in `directory`/model."""
    path = directory / "model"
    save_model(make_model(0), make_tokenizer(), path)
    return path
