"""The trainer's side of published weights on the reference server."""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Any

from policy_trainer.weights.directory import LATEST
from policy_trainer.weights.model_copy import ModelCopy
from policy_trainer.weights.publication import Publication
from shared.api import WeightsFile, WeightsName
from shared.atomic_files import write_json
from shared.client import RefServerClient, RefServerError

# The key of a commit that has the settings for workers.
SETTINGS = "settings"


class UploadedWeights:
    """A `Publisher` that uploads to the server.

    directory: keeps what was published last, so that a resumed run begins a later epoch. settings: for workers.
    """

    def __init__(self, client: RefServerClient, directory: Path, settings: Mapping[str, Any]) -> None:
        self._client = client
        self._directory = directory
        self._settings = settings
        self._uploaded: tuple[WeightsName, Mapping[str, WeightsFile]] | None = None

    def publish(self, copy: ModelCopy, publication: Publication) -> None:
        """Uploads the files and commits them. At the end of a run only the commit is new."""
        self._directory.mkdir(parents=True, exist_ok=True)
        write_json(self._directory / LATEST, asdict(publication))
        words = {**asdict(publication), SETTINGS: self._settings}
        try:
            self._commit(copy, publication.address, words)
        except RefServerError as error:
            if error.code != "not_whole":
                raise
            self._uploaded = None  # the server has lost files since they were uploaded
            self._commit(copy, publication.address, words)

    def has(self, publication: Publication) -> bool:
        return is_there(self._client, publication.address)

    def describe(self) -> str:
        return f"the reference server at {self._client.url}"

    def _commit(self, copy: ModelCopy, name: WeightsName, words: Mapping[str, Any]) -> None:
        if self._uploaded is None or self._uploaded[0] != name:
            self._uploaded = name, self._upload(copy, name)
        self._client.commit_weights(name, self._uploaded[1], words)

    def _upload(self, copy: ModelCopy, name: WeightsName) -> Mapping[str, WeightsFile]:
        with tempfile.TemporaryDirectory(prefix=".upload-", dir=self._directory) as directory:
            copy.save(Path(directory))
            return upload_directory(self._client, name, Path(directory))


def upload_directory(client: RefServerClient, name: WeightsName, directory: Path) -> Mapping[str, WeightsFile]:
    """Uploads the files of a model directory, for a commit. Again is harmless. Raises OSError."""
    files = sorted(path for path in directory.iterdir() if path.is_file())
    return {path.name: client.put_weights(name, path) for path in files}


def is_there(client: RefServerClient, name: WeightsName) -> bool:
    """Whether the server has a version. The question also keeps the server from removing it for a while."""
    try:
        client.weights(name)
    except RefServerError as error:
        if error.status not in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
            raise
        return False
    return True
