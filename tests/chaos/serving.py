"""A tiny model, and a reference server for it that is killed when the block ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from policy_trainer.demo.base_model import make_model, make_tokenizer
from shared.models import save_model
from tests.integration.processes import Server


def tiny_model(directory: Path) -> Path:
    """The demo's architecture with random weights, in `directory`/model."""
    path = directory / "model"
    save_model(make_model(0), make_tokenizer(), path)
    return path


@contextmanager
def serving(model: Path, directory: Path, *options: str) -> Iterator[Server]:
    """`ref-server serve`, ready, its data in `directory`/server; killed when the block ends."""
    directory.mkdir(parents=True, exist_ok=True)
    server = Server(model, directory, None, *options)
    try:
        yield server.until_ready()
    finally:
        server.kill()
