"""The store of published weights: directories below one root, without HTTP.

A committed version is the directory ROOT/RUN/LINEAGE/EPOCH/VERSION, which a rename makes visible with its manifest. It
is a model directory, so a server can load it. Only the disk says which versions exist, so servers may share a root.
"""

import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from ref_server.metrics import WeightsTraffic
from ref_server.weights.catalog import MANIFEST, Catalog, Published
from ref_server.weights.errors import IncompleteVersion, NoWeights, WeightsConflict, WeightsGone, disk_failures
from ref_server.weights.room import Room
from ref_server.weights.staging import FILE_BYTES, ArrivingFile, Staging, check_same
from shared.api import WeightsFile, WeightsName
from shared.atomic_files import sync, write_text

# Two: a worker may still be reading the version before the newest.
KEPT = 2
# Abandoned uploads are removed after this long.
STALE_SECONDS = 3600.0
# After asking for a file, or after its connection broke, a reader counts as reading for so long.
PAUSE_SECONDS = 10.0
# No uploaded file can have these names: they begin with a dot.
_STAGING = ".staging"
_REMOVED = ".removed"


class WeightsStore:
    """Any thread may use it. Raises StorageFull, StorageBroken in addition to what the methods name.

    min_free, most, most_of_token: as for `Room`. unused_seconds: a run's weights are removed when nothing was committed
    for so long.
    """

    def __init__(
        self,
        root: Path,
        *,
        min_free: int | None,
        most: int | None = None,
        most_of_token: int | None = None,
        unused_seconds: float,
    ) -> None:
        self._root = root
        self._catalog = Catalog(root)
        self._room = Room(root, self._used, min_free=min_free, most=most, most_of_token=most_of_token)
        self._unused_seconds = unused_seconds
        self._lock = threading.Lock()
        self.readers = Readers()
        self.traffic = WeightsTraffic()

    def begin(self, name: WeightsName, size: int, token: str = "") -> ArrivingFile:
        """A part to write one file into. size: its bytes, as far as known. token: name of the uploader's token."""
        with disk_failures(), self._lock:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._room.check(token, size)
            self._room.take(token, FILE_BYTES)
            return self._staging(name).begin(token, partial(self._room.take, token))

    def keep(self, name: WeightsName, file: str, part: ArrivingFile, sha256: str | None) -> bool:
        """Makes a part that has arrived the file; False if it is there already.

        Raises WrongDigest when it is not of this SHA-256, WeightsConflict for other content.
        """
        with disk_failures():
            part.finish(sha256)
            with self._lock:
                committed = self._catalog.read(name)
                if committed is None:
                    return self._staging(name).keep(file, part)
        if file not in committed.files:
            raise WeightsConflict(f"version {name} is committed, without {file}")
        check_same(file, committed.files[file], part.content)
        return False

    def commit(self, name: WeightsName, files: Mapping[str, WeightsFile], words: Mapping[str, Any]) -> Published:
        """Makes a version visible. Committed again with the same files it takes over the words.

        Raises IncompleteVersion if a file is missing or differs, WeightsConflict if it is committed with other files.
        """
        with disk_failures(), self._lock:
            known = self._catalog.read(name)
            if known is not None:
                if known.files != files:
                    raise WeightsConflict(f"version {name} is committed with other files")
                self._write_manifest(self._catalog.directory(name), known.model_copy(update={"words": dict(words)}))
            else:
                self._make_visible(name, self._staging(name), files, words)
            published, newest = self._catalog.read(name), self._catalog.newest(name.run, name.lineage)
        assert published is not None and newest is not None
        if newest.name != name:
            self.readers.saw(name)  # else it would go before those who want an older version can use it
        return published

    def newest(self, run: str, lineage: str | None = None) -> Published | None:
        """The newest of a lineage, or of the one that committed last; None before the first."""
        with disk_failures():
            return self._catalog.newest(run, lineage)

    def get(self, name: WeightsName) -> Published:
        """Raises NoWeights, WeightsGone."""
        with disk_failures():
            published = self._catalog.read(name)
            if published is None:
                newest = self._catalog.newest(name.run, name.lineage)
                if newest is not None and newest.name.order > name.order:
                    raise WeightsGone(f"version {name} is not kept any more; {newest.name} is the newest")
                raise NoWeights(f"there is no version {name}")
        self.readers.saw(name)
        return published

    def file(self, name: WeightsName, file: str) -> tuple[Path, WeightsFile]:
        """Where a file is, and what. Read it within `readers.reading`. Raises NoWeights, WeightsGone."""
        content = self.get(name).files.get(file)
        if content is None:
            raise NoWeights(f"version {name} has no file {file}")
        return self._catalog.directory(name) / file, content

    def held(self) -> tuple[int, int]:
        """How many committed versions the store holds, and the bytes of their files."""
        with disk_failures():
            published = [version for run in self._catalog.runs() for version in self._catalog.of_run(run)]
        return len(published), sum(version.bytes for version in published)

    def tidy(self, pinned: Collection[WeightsName]) -> None:
        """Removes old versions, but those that are pinned or being read, and stale uploads.

        A directory that cannot be removed does not keep the others from being removed.
        """
        failures: list[OSError] = []
        with disk_failures():
            for run in self._catalog.runs():
                with _noting(failures):
                    self._remove_old(run, pinned)
            for path in (self._root / _STAGING).glob("*/*/*/*"):
                with _noting(failures), self._lock:
                    Staging(path).sweep(STALE_SECONDS)
                    _remove_empty(path.parent, self._root)
            for path in (self._root / _REMOVED).glob("*"):
                shutil.rmtree(path, ignore_errors=True)
            if failures:
                raise failures[0]

    def _make_visible(
        self, name: WeightsName, staging: Staging, files: Mapping[str, WeightsFile], words: Mapping[str, Any]
    ) -> None:
        staged = staging.complete()
        for file, content in files.items():
            if staged.get(file) != content:
                has = f"has {_describe(staged[file])}" if file in staged else "has not been uploaded"
                raise IncompleteVersion(f"{file} {has}; the manifest says {_describe(content)}", f"files.{file}")
        for superfluous in staged.keys() - files.keys():
            (staging.files / superfluous).unlink()
        number = 1 + max((other.number for other in self._catalog.of_run(name.run)), default=0)
        published = Published(name=name, number=number, files=dict(files), words=dict(words), token=staging.token)
        self._write_manifest(staging.files, published)
        target = self._catalog.directory(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(target) and self._catalog.read(name) is None:  # damaged; another server may have committed
            self._put_aside(target)
        staging.files.rename(target)
        for above in (target.parent, *target.parent.parents[:4]):
            sync(above)
        shutil.rmtree(staging.directory, ignore_errors=True)

    def _write_manifest(self, directory: Path, published: Published) -> None:
        files = {file: content.model_dump() for file, content in published.files.items()}
        manifest = {
            "number": published.number,
            "files": files,
            "words": published.words,
            "token": published.token,
        }
        # In one line: indented, deep JSON would take hundreds of times as many bytes as its commit.
        write_text(directory / MANIFEST, json.dumps(manifest))
        sync(directory)

    def _remove_old(self, run: str, pinned: Collection[WeightsName]) -> None:
        kept = {*pinned, *self.readers.now()}
        published = self._catalog.of_run(run)
        unused = bool(published) and time.time() - self._catalog.committed_at(published[0].name) > self._unused_seconds
        for old in published if unused else published[KEPT:]:
            if old.name not in kept:
                self._remove(old.name)

    def _remove(self, name: WeightsName) -> None:
        directory = self._catalog.directory(name)
        with suppress(FileNotFoundError), self._lock:  # another server may have been faster
            self._put_aside(directory)
            _remove_empty(directory.parent, self._root)

    def _put_aside(self, directory: Path) -> Path:
        """Moves it out of the way. `tidy` deletes what was moved."""
        removed = self._root / _REMOVED
        removed.mkdir(exist_ok=True)
        return directory.rename(removed / uuid4().hex)

    def _staging(self, name: WeightsName) -> Staging:
        return Staging(self._root / _STAGING / name.path)

    def _used(self) -> Counter[str]:
        """Bytes by token, published or being uploaded."""
        used: Counter[str] = Counter()
        for run in self._catalog.runs():
            for published in self._catalog.of_run(run):
                used[published.token] += published.bytes + FILE_BYTES * len(published.files)
        for path in (self._root / _STAGING).glob("*/*/*/*"):
            staging = Staging(path)
            used[staging.token] += staging.bytes
        return used


@contextmanager
def _noting(failures: list[OSError]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        failures.append(error)


def _describe(content: WeightsFile) -> str:
    return f"{content.bytes} bytes, SHA-256 {content.sha256}"


def _remove_empty(directory: Path, root: Path) -> None:
    """Removes a directory below the root and those above it, as far as they are empty."""
    with suppress(OSError):
        while directory != root:
            directory.rmdir()
            directory = directory.parent


class Readers:
    """Any thread may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._reading: dict[WeightsName, int] = {}
        self._seen: dict[WeightsName, float] = {}

    def saw(self, version: WeightsName) -> None:
        """A client has requested a part of it."""
        with self._lock:
            self._seen[version] = self._clock()

    @contextmanager
    def reading(self, version: WeightsName) -> Iterator[None]:
        """Around a long read."""
        with self._lock:
            self._reading[version] = self._reading.get(version, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._reading[version] -= 1
                self._seen[version] = self._clock()
                if not self._reading[version]:
                    del self._reading[version]

    def now(self) -> set[WeightsName]:
        """The versions that are being read."""
        with self._lock:
            begun = self._clock() - PAUSE_SECONDS
            self._seen = {version: seen for version, seen in self._seen.items() if seen > begun}
            return {*self._reading, *self._seen}
