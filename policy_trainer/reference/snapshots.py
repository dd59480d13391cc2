"""One run's snapshots of the policy: models in a directory of the trainer's."""

import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shared.atomic_files import whole_directory
from shared.errors import UserError
from shared.models import save_model

_SNAPSHOT = re.compile(r"epoch-(\d{4,})-version-(\d{8,})")


class Snapshots:
    """Model directories ROOT/RUN/epoch-0000-version-00000001."""

    def __init__(self, root: Path, run: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.root = root
        self._run = run
        self._tokenizer = tokenizer

    @property
    def newest_version(self) -> int:
        """The highest saved version, or 0. A new version must be higher, so that no name is used twice."""
        return max((version_of(path.name)[0] for path in self._saved()), default=0)

    def write(self, model: PreTrainedModel, state: Mapping[str, Tensor], *, epoch: int, version: int) -> str:
        """Writes a model with this state. Returns its name once it would survive a power cut.

        Raises OSError, SafetensorError.
        """
        name = f"{self._run}/epoch-{epoch:04d}-version-{version:08d}"
        with whole_directory(self.root / name, siblings="epoch-*") as directory:
            save_model(model, self._tokenizer, directory, state)
        return name

    def holds(self, name: str) -> bool:
        return (self.root / name).is_dir()

    def find(self, name: str) -> Path:
        """The directory of a snapshot. Raises UserError when it does not exist."""
        if not self.holds(name):
            raise UserError(
                f"reference.snapshot_root: the reference of this run, {name}, is missing from {self.root}: restore "
                "it, or start a new run with --model set to the newest checkpoint"
            )
        return self.root / name

    def remove_all_but(self, kept: Collection[str | None]) -> None:
        """Removes other snapshots of this run, but never the newest. Raises OSError where removal is not allowed."""
        for path in sorted(self._saved(), key=lambda path: version_of(path.name))[:-1]:
            if f"{self._run}/{path.name}" not in kept:
                shutil.rmtree(path)

    def _saved(self) -> list[Path]:
        return [path for path in (self.root / self._run).glob("epoch-*") if _SNAPSHOT.fullmatch(path.name)]


def version_of(name: str) -> tuple[int, int]:
    """Version and epoch of a snapshot."""
    match = _SNAPSHOT.fullmatch(name.rpartition("/")[2])
    assert match is not None
    return int(match[2]), int(match[1])
