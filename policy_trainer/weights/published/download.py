"""The workers' side of published weights on the reference server: versions are downloaded in the background."""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path

from policy_trainer.processes.lifecycle.endings import write_failures
from policy_trainer.weights.published.publication import KEPT, Publication, weights_versions
from shared.api import WeightsName, WeightsVersion
from shared.atomic_files import VersionedDirectory, remove_directory
from shared.client import RefServerClient, RefServerError
from shared.errors import UserError

# Length of a poll, after which the run may have been started again, or have finished.
_POLL_SECONDS = 5.0
# How long a worker waits for the thread when it ends.
_ENDING_SECONDS = 1.0
# Files that a version may contain. Code is refused, and so are pickles, since loading one can run code.
_KINDS = (".safetensors", ".json", ".jinja", ".txt", ".model", ".md")
# Bytes of the disk that a download leaves free.
_SPARE = 2**28


def downloads(directory: Path, name: WeightsName) -> VersionedDirectory:
    """What was downloaded of a version's lineage."""
    return weights_versions(directory / name.lineage)


def place(directory: Path, name: WeightsName) -> Path:
    return downloads(directory, name).path(name.epoch, name.version)


def fetch(client: RefServerClient, version: WeightsVersion, directory: Path) -> Path | None:
    """The directory of a version, downloaded unless it is there. It appears when it is complete and checked.

    None if the server has removed it: there is a newer one. Raises WrongContent, UserError for files that no model has,
    RunFailed for a full disk.
    """
    target = place(directory, version.name)
    if target.is_dir():
        return target
    if strange := [file for file in version.files if not file.endswith(_KINDS)]:
        raise UserError(
            f"weights: version {version.name} has the file {strange[0]}, and workers load only {', '.join(_KINDS)}",
            "publish weights as safetensors",
        )
    try:
        with write_failures(target, "make room, and start this worker again"):
            target.parent.mkdir(parents=True, exist_ok=True)
            _check_room(target.parent, version)
            with downloads(directory, version.name).write(version.name.epoch, version.name.version) as temporary:
                for file, content in version.files.items():
                    client.download_weights(version.name, file, content, temporary / file)
                _check_shards(temporary)
    except RefServerError as error:
        if error.status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
            return None
        raise
    return target


def _check_room(directory: Path, version: WeightsVersion) -> None:
    """Raises OSError if the version does not fit on the disk."""
    needed, free = sum(content.bytes for content in version.files.values()), shutil.disk_usage(directory).free
    if needed > free - _SPARE:
        raise OSError(
            f"version {version.name} has {needed / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB of the disk are free, "
            f"of which {_SPARE / 2**20:,.0f} stay free"
        )


def _check_shards(directory: Path) -> None:
    """Raises UserError for an index that names files elsewhere: transformers would read them."""
    for index in directory.glob("*.index.json"):
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, LookupError, TypeError, AttributeError):
            raise UserError(f"weights: {index.name} of the published version is no index of shards") from None
        if strange := shards - {file.name for file in directory.iterdir()}:
            raise UserError(f"weights: {index.name} of the published version names {min(strange)!a}, which it lacks")


class DownloadedWeights:
    """The `PublishedWeights` of a worker that shares no directory with the trainer.

    A thread looks for versions and downloads them while the sampler samples; the first call of `newest` starts it.
    `newest` is the newest that has arrived. directory: of this worker only; it keeps two versions, and those in use.
    """

    def __init__(self, client: RefServerClient, run: str, directory: Path) -> None:
        self._client = client
        self._run = run
        self._directory = directory
        self._newest: Publication | None = None
        self._failure: Exception | None = None
        self._reading: set[Path] = set()
        self._changing = threading.Lock()
        self._closed = threading.Event()
        # A daemon: a request cannot be broken off, and must not keep the process.
        self._thread = threading.Thread(target=self._watch, name="weights", daemon=True)

    def newest(self) -> Publication | None:
        """Raises what keeps new versions from coming."""
        with self._changing:
            if self._thread.ident is None:
                self._thread.start()
        if self._failure is not None:
            raise self._failure
        return self._newest

    @contextmanager
    def reading(self, publication: Publication, reader: str) -> Iterator[Path]:
        version = place(self._directory, publication.address)
        with self._changing:
            self._reading.add(version)
        try:
            if not version.is_dir():
                raise FileNotFoundError(f"{version} was removed: newer weights have come")
            yield version
        finally:
            with self._changing:
                self._reading.discard(version)

    def describe(self) -> str:
        return f"the reference server at {self._client.url}"

    def close(self) -> None:
        """Ends the thread, or abandons it with the request that it has begun."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(_ENDING_SECONDS)
        self._client.close()

    def _watch(self) -> None:
        seen: WeightsVersion | None = None
        try:
            while not self._closed.is_set() and not (self._newest and self._newest.finished):
                version = self._look(seen)
                if version is not None:
                    seen = self._take(version)
        except Exception as error:  # raised where the sampler asks
            self._failure = error

    def _look(self, seen: WeightsVersion | None) -> WeightsVersion | None:
        """A version other than `seen`: newer, another training's, or this one's end. Waits a while for it."""
        if seen is None:
            return self._client.newest_weights(self._run, wait_seconds=_POLL_SECONDS)
        newest = self._client.newest_weights(self._run)  # a poll misses changes that came before it
        if newest is not None and newest != seen:
            return newest
        after = seen.name.order
        return self._client.newest_weights(self._run, seen.lineage, after=after, wait_seconds=_POLL_SECONDS)

    def _take(self, version: WeightsVersion) -> WeightsVersion | None:
        """Makes a version the newest; None when the server has removed it meanwhile."""
        publication = Publication.parse({**version.words, **asdict(version.name)})
        target = fetch(self._client, version, self._directory)
        if target is None:
            return None
        self._newest = publication
        with self._changing:
            # By time, because the versions of another training are newer, whatever their numbers.
            lineages = [weights_versions(lineage) for lineage in self._directory.iterdir()]
            for lineage in lineages:  # in those of other trainings no version is written any more
                lineage.remove_leftovers()
            versions = [path for lineage in lineages for path in lineage.by_numbers().values()]
            for old in sorted(versions, key=lambda path: path.stat().st_mtime)[:-KEPT]:
                if old != target and old not in self._reading:
                    remove_directory(old)
        return version
