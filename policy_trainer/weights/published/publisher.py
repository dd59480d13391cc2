"""The trainer's side of published weights: in a background thread, to a directory or to the reference server."""

import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Any

from policy_trainer.config import TrainConfig
from policy_trainer.config.worker_settings import worker_settings
from policy_trainer.run_files.run_directory import RunDirectory
from policy_trainer.weights.published.directory import LATEST, WeightsDirectory
from policy_trainer.weights.published.publication import Publication, Publisher, Save
from shared.api import WeightsFile, WeightsName
from shared.atomic_files import write_json
from shared.client import RefServerClient, RefServerError

# How long a version that is being published may take once the run is asked to stop.
_ENDING_SECONDS = 10.0

# The key of a commit that has the settings for workers.
SETTINGS = "settings"


class BackgroundPublisher:
    """Publishes in a background thread. Of the versions that wait only the newest is published."""

    def __init__(self, weights: Publisher) -> None:
        self._weights = weights
        self._changing = threading.Lock()
        self._waiting: tuple[Save, Publication] | None = None
        self._published: Publication | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def publish(self, save: Save, publication: Publication) -> None:
        """Returns at once. Raises the error of an earlier publication."""
        self._raise_failure()
        with self._changing:
            self._waiting = save, publication
            if self._thread is None:
                # A daemon: a request to a server that hangs cannot be broken off, and must not keep the process.
                self._thread = threading.Thread(target=self._publish_waiting, name="publish", daemon=True)
                self._thread.start()

    def lost(self) -> bool:
        """Whether the newest version was published and is gone. Raises the error of a failed publication."""
        self._raise_failure()
        with self._changing:
            published = self._published if self._thread is None else None
        return published is not None and not self._weights.has(published)

    def describe(self) -> str:
        return self._weights.describe()

    def wait(self, check: Callable[[], None]) -> None:
        """Returns once the newest version is published. Raises the error of a failed publication.

        check: called every few seconds; it may raise to stop.
        """
        while not self._ends_soon():
            check()
        self._raise_failure()

    def close(self) -> None:
        """Waits a while for the version that is being published. The one that waits is not published."""
        with self._changing:
            self._waiting = None
        self._ends_soon()

    def _ends_soon(self) -> bool:
        with self._changing:
            thread = self._thread
        if thread is not None:
            thread.join(_ENDING_SECONDS)
        return thread is None or not thread.is_alive()

    def _publish_waiting(self) -> None:
        while True:
            with self._changing:
                waiting, self._waiting = self._waiting, None
                if waiting is None:
                    self._thread = None
                    return
            try:
                self._weights.publish(*waiting)
                self._published = waiting[1]
            except BaseException as error:  # raised where the trainer asks
                self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class UploadedWeights:
    """A `Publisher` that uploads to the server.

    directory: keeps what was published last, so that a resumed run begins a later epoch. settings: for workers.
    """

    def __init__(self, client: RefServerClient, directory: Path, settings: Mapping[str, Any]) -> None:
        self._client = client
        self._directory = directory
        self._settings = settings
        self._uploaded: tuple[WeightsName, Mapping[str, WeightsFile]] | None = None

    def publish(self, save: Save, publication: Publication) -> None:
        """Uploads the files and commits them. At the end of a run only the commit is new."""
        self._directory.mkdir(parents=True, exist_ok=True)
        write_json(self._directory / LATEST, asdict(publication))
        words = {**asdict(publication), SETTINGS: self._settings}
        try:
            self._commit(save, publication.address, words)
        except RefServerError as error:
            if error.code != "not_whole":
                raise
            self._uploaded = None  # the server has lost files since they were uploaded
            self._commit(save, publication.address, words)

    def has(self, publication: Publication) -> bool:
        return is_there(self._client, publication.address)

    def describe(self) -> str:
        return f"the reference server at {self._client.url}"

    def _commit(self, save: Save, name: WeightsName, words: Mapping[str, Any]) -> None:
        if self._uploaded is None or self._uploaded[0] != name:
            self._uploaded = name, self._upload(save, name)
        self._client.commit_weights(name, self._uploaded[1], words)

    def _upload(self, save: Save, name: WeightsName) -> Mapping[str, WeightsFile]:
        with tempfile.TemporaryDirectory(prefix=".upload-", dir=self._directory) as directory:
            save(Path(directory))
            return upload_directory(self._client, name, Path(directory))


def upload_directory(client: RefServerClient, name: WeightsName, directory: Path) -> Mapping[str, WeightsFile]:
    """Uploads the files of a model directory, for a commit. Repeating it is harmless. Raises OSError."""
    files = sorted(path for path in directory.iterdir() if path.is_file())
    return {path.name: client.put_weights(name, path) for path in files}


def is_there(client: RefServerClient, name: WeightsName) -> bool:
    """Whether the server has a version. The request also keeps the server from removing it for a while."""
    try:
        client.weights(name)
    except RefServerError as error:
        if error.status not in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
            raise
        return False
    return True


def choose_publisher(config: TrainConfig, client: RefServerClient) -> Publisher:
    directory = RunDirectory(config.run_dir).weights
    if config.weights == "server":
        return UploadedWeights(client, directory, worker_settings(config))
    return WeightsDirectory(directory)
