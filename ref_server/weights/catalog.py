"""Committed versions of weights: what is known of one, its name as a snapshot, and reading them from the disk."""

import errno
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog
from pydantic import BaseModel, ConfigDict, Field

from ref_server.weights.staging import has_size
from shared.api import PLAIN_NAME, PlainName, WeightsFile, WeightsName, WeightsVersion

# The directory of all weights below the data directory, and the beginning of a version's name as a snapshot.
FOLDER = "weights"
_SNAPSHOT = re.compile(rf"{FOLDER}/([^/]+)/([^/]+)/(\d{{1,19}})/(\d{{1,19}})", re.ASCII)


def version_of_snapshot(name: str | None) -> WeightsName | None:
    """The version that a snapshot's name stands for; None for a snapshot of another kind."""
    match = _SNAPSHOT.fullmatch(name or "")
    return match and WeightsName(match[1], match[2], int(match[3]), int(match[4]))


class Published(BaseModel):
    """A committed version. number: rises with each new version of the run. words: the commit's other fields.

    token: the name of the token that it was uploaded with; empty without one.
    """

    model_config = ConfigDict(frozen=True)

    name: WeightsName
    number: int = Field(ge=0, strict=True)
    files: dict[PlainName, WeightsFile] = Field(min_length=1)
    words: dict[str, Any]
    token: str = ""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    @property
    def view(self) -> WeightsVersion:
        return WeightsVersion.model_validate({**self.words, **asdict(self.name), "files": self.files})


log = structlog.get_logger()

# No uploaded file can have this name: it begins with a dot.
MANIFEST = ".manifest.json"
# A commit is at most 1 MiB of JSON; escaped, a character may take three times as many bytes here.
_MOST_BYTES = 8 * 2**20
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)
# The disk or the process is at fault, not a version.
_NOT_OF_ONE_FILE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Catalog:
    """The versions below a root: directories RUN/LINEAGE/EPOCH/VERSION with a manifest.

    They may go while they are listed: then they are left out. So are damaged ones, as if they had never been committed;
    the log names each once.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._damaged: set[WeightsName] = set()

    def directory(self, name: WeightsName) -> Path:
        return self._root / name.path

    def runs(self) -> Iterator[str]:
        if self._root.is_dir():
            yield from sorted(path.name for path in self._root.iterdir() if not path.name.startswith("."))

    def read(self, name: WeightsName) -> Published | None:
        directory = self.directory(name)
        try:
            published = _read_manifest(name, directory)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, RecursionError) as error:  # ValueError: of JSON, of UTF-8, of pydantic
            if isinstance(error, OSError) and error.errno in _NOT_OF_ONE_FILE:
                raise
            self._report(name, error)
            return None
        self._damaged.discard(name)
        return published

    def of_run(self, run: str) -> list[Published]:
        """The newest first; those of the lineage that committed last before all others."""
        names = [path.parts[-3:] for path in (self._root / run).glob("*/*/*")]
        known = [
            WeightsName(run, lineage, int(epoch), int(version))
            for lineage, epoch, version in names
            if re.match(PLAIN_NAME, lineage) and _NUMBER.fullmatch(epoch) and _NUMBER.fullmatch(version)
        ]
        versions = [version for name in known if (version := self.read(name))]
        last = max(versions, key=lambda version: version.number).name.lineage if versions else ""
        return sorted(versions, key=lambda version: (version.name.lineage == last, version.name.order), reverse=True)

    def newest(self, run: str, lineage: str | None) -> Published | None:
        """Of a lineage, or of the one that committed last."""
        return next((version for version in self.of_run(run) if lineage in (None, version.name.lineage)), None)

    def committed_at(self, name: WeightsName) -> float:
        try:
            return (self.directory(name) / MANIFEST).stat().st_mtime
        except FileNotFoundError:
            return time.time()

    def _report(self, name: WeightsName, error: Exception) -> None:
        directory = self.directory(name)
        if name not in self._damaged and os.path.lexists(directory / MANIFEST):  # else it is being removed
            self._damaged.add(name)
            log.error(
                "published weights are damaged and count as never committed",
                directory=str(directory),
                error=str(error)[:300],
                remedy="publish this version again, or remove the directory",
            )


def _read_manifest(name: WeightsName, directory: Path) -> Published:
    """Raises OSError, ValueError, TypeError or RecursionError if it is damaged, or a file of the version is missing."""
    path = directory / MANIFEST
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
        raise ValueError(f"{MANIFEST} must be a file of at most {_MOST_BYTES} bytes")
    published = Published.model_validate({**json.loads(path.read_bytes()), "name": name})
    for file, content in published.files.items():
        if not has_size(directory / file, content.bytes):
            raise ValueError(f"{file} is missing, or does not have the {content.bytes} bytes that were committed")
    return published
