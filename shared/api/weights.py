"""Published weights: the versions of a run's model that trainers upload and workers download."""

import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import to_json

from shared.api.base import ResponseRecord, Version, example

# No leading dot: neither a hidden file nor a way up.
PLAIN_NAME = "^[A-Za-z0-9_-][A-Za-z0-9._-]*$"
PlainName = Annotated[str, Field(pattern=PLAIN_NAME, max_length=200)]
_SHA256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


@dataclass(frozen=True)
class WeightsName:
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
        """Its name where it becomes the reference."""
        return f"weights/{self.path}"

    def __str__(self) -> str:
        return f"{self.epoch}.{self.version} of run {self.run}, lineage {self.lineage}"


class WeightsFile(ResponseRecord):
    bytes: int = Field(ge=0, lt=2**63, strict=True)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


Files = Annotated[dict[PlainName, WeightsFile], Field(min_length=1, max_length=10_000)]


class CommitBody(BaseModel):
    """The files of a version. The server keeps all other keys without reading them."""

    model_config = ConfigDict(extra="allow", frozen=True) | example(
        files={"model.safetensors": {"bytes": 4, "sha256": _SHA256}}, next_index=0
    )

    files: Files

    @property
    def words(self) -> dict[str, Any]:
        """All but the files."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _words_are_json(self) -> "CommitBody":
        try:
            json.dumps(self.words, allow_nan=False, ensure_ascii=False).encode()
            to_json([[self.words]])  # nested a little deeper than in an answer
        except (ValueError, RecursionError):
            message = "must be JSON without NaN, infinity and lone surrogates, of at most about 200 levels"
            raise ValueError(message) from None
        return self


class WeightsVersion(ResponseRecord):
    """A committed version with its files, and all other keys of its commit."""

    model_config = ConfigDict(extra="allow", frozen=True)

    run: PlainName
    lineage: PlainName
    epoch: Version
    version: Version
    files: Files

    @property
    def name(self) -> WeightsName:
        return WeightsName(self.run, self.lineage, self.epoch, self.version)

    @property
    def words(self) -> dict[str, Any]:
        """The other keys of the commit."""
        return dict(self.model_extra or {})
