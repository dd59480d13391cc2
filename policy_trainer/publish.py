"""Published weights: how a trainer hands them to its workers, through a directory that both can see.

Each publication is a safetensors file of its own; `latest.json` is replaced in one rename, so that a reader sees the
old publication or the new one, never half of one.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors.torch
from transformers import PreTrainedModel

# A worker may still be reading the one before the newest.
KEPT = 2


@dataclass(frozen=True)
class Publication:
    """Which weights: a run's epoch and the number of steps behind them.

    file: name in the directory. next_index: where a worker without a memory of its own begins among the problems.
    finished: the run is over, and workers may go.
    """

    run: str
    epoch: int
    version: int
    next_index: int
    finished: bool = False

    @property
    def file(self) -> str:
        return f"{self.epoch:04d}-{self.version:08d}.safetensors"


def publish(model: PreTrainedModel, directory: Path, publication: Publication) -> None:
    """Writes the weights, then points latest.json at them, then removes old ones."""
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".{publication.file}.tmp"
    safetensors.torch.save_model(model, str(temporary))
    temporary.replace(directory / publication.file)
    write_json(directory / "latest.json", asdict(publication))
    for old in sorted(directory.glob("*.safetensors"))[:-KEPT]:
        old.unlink()


def latest(directory: Path) -> Publication | None:
    """The newest publication, or None before the first."""
    try:
        return Publication(**json.loads((directory / "latest.json").read_text()))
    except FileNotFoundError:
        return None


def load_weights(model: PreTrainedModel, file: Path) -> None:
    """Copies published weights into a model of the same architecture. Raises RuntimeError when they do not fit."""
    safetensors.torch.load_model(model, str(file), device=str(model.device))


def write_json(path: Path, value: object, *, durable: bool = False) -> None:
    """Replaces a JSON file in one rename; `durable` also waits until the file is on the disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        json.dump(value, file, indent=2)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)
