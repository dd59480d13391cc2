"""A publication, and the protocols of the places through which workers get weights."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from pydantic import TypeAdapter, ValidationError

from policy_trainer.data.completion import Probe
from shared.api import WeightsName
from shared.api.base import Version
from shared.atomic_files import VersionedDirectory
from shared.errors import UserError

# Versions that a directory keeps. Two: a worker may still be reading the one before the newest.
KEPT = 2
# By epoch and version.
_NAME = "{0:04d}-{1:08d}"

# Writes the policy as it was at some moment into a directory: a Hugging Face model, or adapters.
Save = Callable[[Path], None]


@dataclass(frozen=True)
class Publication:
    """The published weights of a run.

    epoch: of the run. version: training steps done. next_index: the problem at which a new worker begins. max_waiting:
    groups of the run that may wait in the server; at this number workers pause, to limit staleness. groups: how many
    groups all workers sample with these weights, from next_index on, before they wait for others; None: as many as
    max_waiting lets them. finished: the run is over, and workers exit. lineage: which training of the run's name this
    is. probe: log-probs for the sampler to compare with its own; None before the first step of a process.
    """

    run: str
    epoch: Version
    version: Version
    next_index: Version
    max_waiting: Version
    groups: Version | None = None
    finished: bool = False
    lineage: str = ""
    probe: Probe | None = None

    @classmethod
    def parse(cls, fields: Mapping[str, Any] | bytes) -> Self:
        """From the result of `asdict`, or that as JSON. Unknown names are ignored.

        Raises UserError for invalid values.
        """
        adapter = TypeAdapter(cls)
        try:
            return adapter.validate_json(fields) if isinstance(fields, bytes) else adapter.validate_python(fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UserError(f"weights: the published {where or 'description'} cannot be used: {first['msg']}") from None

    @property
    def name(self) -> str:
        """The name of its directory."""
        return _NAME.format(self.epoch, self.version)

    @property
    def address(self) -> WeightsName:
        """What the version is called on the reference server."""
        return WeightsName(self.run, self.lineage, self.epoch, self.version)


def weights_versions(root: Path) -> VersionedDirectory:
    """The weights that lie below a directory by their epochs and versions."""
    return VersionedDirectory(root, _NAME)


class Publisher(Protocol):
    """The trainer's side. Each version is a Hugging Face model directory, with its tokenizer."""

    def publish(self, save: Save, publication: Publication) -> None:
        """Readers see all of it afterwards, and nothing of it before."""
        ...

    def has(self, publication: Publication) -> bool:
        """Whether readers still find it."""
        ...

    def describe(self) -> str:
        """Where it is, for messages."""
        ...


class PublishedWeights(Protocol):
    """The workers' side."""

    def newest(self) -> Publication | None:
        """None before the first."""
        ...

    def reading(self, publication: Publication, reader: str) -> AbstractContextManager[Path]:
        """The model directory, which stays complete while the block reads it. reader: a name for the reader.

        Raises OSError if it is gone because there is a newer version.
        """
        ...

    def describe(self) -> str:
        """Where it is, for messages."""
        ...
