"""The name of a version of weights, and what is known of one that is committed."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from shared.api import WeightsFile, WeightsVersion

# The directory of all weights below the data directory, and the beginning of a version's name as a snapshot.
FOLDER = "weights"
_SNAPSHOT = re.compile(rf"{FOLDER}/([^/]+)/([^/]+)/(\d{{1,19}})/(\d{{1,19}})", re.ASCII)


@dataclass(frozen=True)
class Version:
    """epoch, version: as in a run's batches; a later epoch is newer."""

    run: str
    lineage: str
    epoch: int
    version: int

    @property
    def order(self) -> tuple[int, int]:
        return self.epoch, self.version

    @property
    def path(self) -> PurePosixPath:
        """Below the directory of all weights."""
        return PurePosixPath(self.run, self.lineage, str(self.epoch), str(self.version))

    @property
    def snapshot(self) -> str:
        """Its name for `PUT /v1/reference`."""
        return f"{FOLDER}/{self.path}"

    def __str__(self) -> str:
        return f"{self.epoch}.{self.version} of run {self.run}, lineage {self.lineage}"


def version_of_snapshot(name: str | None) -> Version | None:
    """The version that a snapshot's name stands for; None for a snapshot of another kind."""
    match = _SNAPSHOT.fullmatch(name or "")
    return match and Version(match[1], match[2], int(match[3]), int(match[4]))


@dataclass(frozen=True)
class Published:
    """A committed version. number: rises with each new version of the run. words: what the commit said beside files."""

    name: Version
    number: int
    files: Mapping[str, WeightsFile]
    words: Mapping[str, Any]

    @property
    def view(self) -> WeightsVersion:
        return WeightsVersion.model_validate({**self.words, **asdict(self.name), "files": self.files})
