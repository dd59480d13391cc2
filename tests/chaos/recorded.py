"""`python -m tests.chaos.recorded ARCHIVE COMMAND …`: `policy-trainer`, which keeps what it publishes and uploads.

ARCHIVE/versions has the published versions by their names, ARCHIVE/batches the bodies of the batches by their ids.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from policy_trainer.__main__ import main as policy_trainer
from policy_trainer.weights.published.directory import WeightsDirectory
from policy_trainer.weights.published.publication import Publication, Save
from shared import wire
from shared.api import Uploaded
from shared.batch import Batch
from shared.client import RefServerClient, RefServerError


def main() -> None:
    archive = Path(sys.argv.pop(1))
    _keep_versions(archive / "versions")
    _keep_batches(archive / "batches")
    policy_trainer()


def _keep_versions(archive: Path) -> None:
    publish = WeightsDirectory.publish

    def keeping(self: WeightsDirectory, save: Save, publication: Publication) -> None:
        publish(self, save, publication)
        kept = archive / publication.name
        if not kept.exists():
            kept.mkdir(parents=True)
            for file in (Path(self.describe()) / publication.name).iterdir():
                (kept / file.name).hardlink_to(file)

    WeightsDirectory.publish = keeping


def _keep_batches(archive: Path) -> None:
    """A worker uploads all its batches by `upload_several`."""
    upload = RefServerClient.upload_several

    def keeping(self: RefServerClient, batches: Sequence[Batch | bytes]) -> list[Uploaded | RefServerError]:
        results = upload(self, batches)
        archive.mkdir(parents=True, exist_ok=True)
        for batch, result in zip(batches, results, strict=True):
            if isinstance(result, Uploaded):
                body = batch if isinstance(batch, bytes) else wire.encode(batch)
                (archive / f"{result.id}.safetensors").write_bytes(body)
        return results

    RefServerClient.upload_several = keeping
