"""Reads which reference the server scores with, and replaces it by a snapshot, which may have to be uploaded."""

import time
from pathlib import Path

from policy_trainer.config import ENV_PREFIX
from policy_trainer.reference.snapshots import version_of
from policy_trainer.weights.publisher import is_there, upload_directory
from shared.api import ModelInfo, WeightsName
from shared.batch import RolloutBatch, ScoredBatch
from shared.client import RefServerClient, RefServerError
from shared.client.connection import OnWait
from shared.client.credentials import remedy
from shared.errors import UserError

# Codes of errors to retry after: another client replaces the reference, or has just replaced it; or the server has lost
# files since they were uploaded.
_RETRIED = ("busy", "older_version", "not_whole")
_BUSY_SECONDS = 0.5


class SharedSnapshots:
    """Snapshots in a directory `root` that trainer and server share. snapshot: the name of a complete one."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def name(self, snapshot: str) -> str:
        """What the server calls it."""
        return snapshot

    def bring(self, snapshot: str) -> None:
        """Returns when the server has all of it. Repeating it is harmless. Raises ClientError, OSError."""

    def explain(self, snapshot: str, error: RefServerError) -> str:
        """Why the server does not accept it, and what to do."""
        if error.code == "no_snapshot_root":
            return (
                "reference.sync_steps: the server cannot replace its reference: start ref-server with --snapshot-root "
                f"{self._root}"
            )
        if error.code == "not_found":
            return (
                f"reference.snapshot_root: the server does not find {snapshot} below its --snapshot-root; "
                f"is {self._root} the same directory?"
            )
        return f"reference.sync_steps: the server does not take {snapshot}: {error}"


class UploadedSnapshots(SharedSnapshots):
    """Uploads snapshots to the server, as weights of a separate run, since no worker may sample with them.

    The server removes old versions. So the trainer keeps those that it may need again in its own directory, `root`.
    """

    def __init__(self, root: Path, client: RefServerClient, run: str, lineage: str) -> None:
        super().__init__(root)
        self._client = client
        self._run = f"{run}.reference"
        self._lineage = lineage

    def name(self, snapshot: str) -> str:
        return self._address(snapshot).snapshot

    def bring(self, snapshot: str) -> None:
        name = self._address(snapshot)
        if not is_there(self._client, name):
            self._client.commit_weights(name, upload_directory(self._client, name, self._root / snapshot), {})

    def explain(self, snapshot: str, error: RefServerError) -> str:
        return f"reference.sync_steps: the server does not take {self.name(snapshot)}: {error}"

    def _address(self, snapshot: str) -> WeightsName:
        version, epoch = version_of(snapshot)
        return WeightsName(self._run, self._lineage, epoch, version)


class ServedReference:
    """The model that the server scores with. on_wait: called while waiting; it may raise to stop."""

    def __init__(self, client: RefServerClient, place: SharedSnapshots, on_wait: OnWait) -> None:
        self._client = client
        self._place = place
        self._on_wait = on_wait

    def check_role(self) -> None:
        """Raises UserError for a token that may not replace the reference."""
        try:
            self._client.check_reference_role()
        except RefServerError as error:
            raise UserError(f"reference.sync_steps: {error}{remedy(error, ENV_PREFIX)}") from error

    def look(self) -> ModelInfo:
        return self._client.model()

    def newest_version(self) -> int:
        """The highest version that the server has, or should have."""
        return _newest_version(self.look())

    def is_served(self, served: ModelInfo, snapshot: str) -> bool:
        """Whether a server that looks so scores with the snapshot."""
        return served.snapshot == self._place.name(snapshot)

    def score(self, batch: RolloutBatch) -> ScoredBatch:
        return self._client.score(batch)

    def replace(self, snapshot: str, version: int) -> int:
        """Makes the server score with a snapshot. Returns its version, which is `version` or higher.

        A repeated call changes nothing. Raises UserError when the server refuses.
        """
        began = time.monotonic()
        while True:
            served = self.look()
            if self.is_served(served, snapshot):
                return served.reference_version or 0
            try:
                self._place.bring(snapshot)
                wanted = max(version, _newest_version(served) + 1)
                return self._client.replace_reference(self._place.name(snapshot), wanted).reference_version
            except RefServerError as error:
                if error.code not in _RETRIED:
                    raise UserError(self._place.explain(snapshot, error)) from error
            self._on_wait("the reference server to finish another replacement", time.monotonic() - began)
            time.sleep(_BUSY_SECONDS)


def _newest_version(served: ModelInfo) -> int:
    """A server that has lost the weights that its queue needs scores with others, and accepts none of that version."""
    return max(served.reference_version or 0, served.wanted_version or 0)
