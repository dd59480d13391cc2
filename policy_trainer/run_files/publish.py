"""Published weights: the trainer writes them to a directory, and its workers load them from there.

Each publication is a safetensors file of its own; `latest.json` is replaced in one rename, so that a reader sees the
old publication or the new one, never half of one.
"""

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors.torch
from transformers import PreTrainedModel

from policy_trainer.run_files.atomic_files import write_json

# Two: a worker may still be reading the publication before the newest.
KEPT = 2


@dataclass(frozen=True)
class Publication:
    """The published weights of a run.

    epoch: of the run. version: training steps done. file: name in the directory. next_index: the problem at which a new
    worker begins. max_waiting: groups of the run that may wait in the server; at this number workers pause, to limit
    staleness. finished: the run is over, and workers exit. lineage: which training of the run's name this is.
    """

    run: str
    epoch: int
    version: int
    next_index: int
    max_waiting: int
    finished: bool = False
    lineage: str = ""

    @property
    def file(self) -> str:
        return f"{self.epoch:04d}-{self.version:08d}.safetensors"


def publish(model: PreTrainedModel, directory: Path, publication: Publication) -> None:
    """Writes the weights, then points latest.json at them, then removes old ones."""
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob(".*.safetensors.tmp"):  # left by a killed trainer
        leftover.unlink()
    temporary = directory / f".{publication.file}.tmp"
    safetensors.torch.save_model(model, str(temporary))
    temporary.replace(directory / publication.file)
    write_json(directory / "latest.json", asdict(publication))
    for old in sorted(directory.glob("*.safetensors"))[:-KEPT]:
        old.unlink()


def latest(directory: Path) -> Publication | None:
    """The newest publication, or None before the first."""
    path = directory / "latest.json"
    try:
        return Publication(**json.loads(_read_newest(path)))
    except FileNotFoundError:
        return None


@contextmanager
def second_name(file: Path, reader: str) -> Iterator[Path]:
    """Published weights by a name that the publisher does not remove, while `reader` reads them.

    On a network file system whoever reads a file without a name gets an error, or dies (SIGBUS): its pages are gone.
    Where there are no such links the file's own name has to do.
    """
    link = file.with_name(f".read-by-{reader}")
    try:
        link.unlink(missing_ok=True)  # left by a killed reader
        link.hardlink_to(file)
    except OSError:
        yield file
        return
    try:
        yield link
    finally:
        link.unlink(missing_ok=True)


def _read_newest(path: Path) -> str:
    """The text of a file that others replace. On NFS one that is replaced while it is read is stale."""
    try:
        return path.read_text()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return path.read_text()
