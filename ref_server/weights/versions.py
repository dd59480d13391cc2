"""What is known of a committed version of weights, and its name as a snapshot."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shared.api import WeightsFile, WeightsName, WeightsVersion

# The directory of all weights below the data directory, and the beginning of a version's name as a snapshot.
FOLDER = "weights"
_SNAPSHOT = re.compile(rf"{FOLDER}/([^/]+)/([^/]+)/(\d{{1,19}})/(\d{{1,19}})", re.ASCII)


def version_of_snapshot(name: str | None) -> WeightsName | None:
    """The version that a snapshot's name stands for; None for a snapshot of another kind."""
    match = _SNAPSHOT.fullmatch(name or "")
    return match and WeightsName(match[1], match[2], int(match[3]), int(match[4]))


@dataclass(frozen=True)
class Published:
    """A committed version. number: rises with each new version of the run. words: the commit's other fields.

    token: the name of the token that it was uploaded with; empty without one.
    """

    name: WeightsName
    number: int
    files: Mapping[str, WeightsFile]
    words: Mapping[str, Any]
    token: str

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    @property
    def view(self) -> WeightsVersion:
        return WeightsVersion.model_validate({**self.words, **asdict(self.name), "files": self.files})
