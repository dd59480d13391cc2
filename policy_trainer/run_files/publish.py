"""Published weights: how a trainer hands them to its workers, through a directory that both can see.

Each publication is a safetensors file of its own; `latest.json` is replaced in one rename, so that a reader sees the
old publication or the new one, never half of one.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors.torch
from transformers import PreTrainedModel

from policy_trainer.run_files.atomic_files import write_json

# A worker may still be reading the one before the newest.
KEPT = 2


@dataclass(frozen=True)
class Publication:
    """Which weights: a run's epoch and the number of steps behind them.

    file: name in the directory. next_index: where a worker without a memory of its own begins among the problems.
    max_waiting: groups of the run that may wait in the server; with more, workers wait, so that none grows old.
    finished: the run is over, and workers may go.
    """

    run: str
    epoch: int
    version: int
    next_index: int
    max_waiting: int
    finished: bool = False

    @property
    def file(self) -> str:
        return f"{self.epoch:04d}-{self.version:08d}.safetensors"


def publish(model: PreTrainedModel, directory: Path, publication: Publication) -> None:
    """Writes the weights, then points latest.json at them, then removes old ones."""
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob(".*.safetensors.tmp"):  # of a trainer that was killed here
        leftover.unlink()
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
