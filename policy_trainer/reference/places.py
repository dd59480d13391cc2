"""Where the server finds the snapshots of a run, by the names of the setting `weights`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from policy_trainer.config import WeightsPlace
from policy_trainer.reference.snapshots import version_of
from policy_trainer.weights.upload import is_there, upload_directory
from shared.api import WeightsName
from shared.client import RefServerClient, RefServerError


class SnapshotPlace(Protocol):
    """snapshot: the name of one that lies whole in the trainer's own directory."""

    def name(self, snapshot: str) -> str:
        """What the server calls it."""
        ...

    def bring(self, snapshot: str) -> None:
        """Returns when the server has all of it. Again is harmless. Raises ClientError, OSError."""
        ...

    def explain(self, snapshot: str, error: RefServerError) -> str:
        """Why the server does not take it, and what to do."""
        ...


class SharedRoot:
    """root: a directory that trainer and server share."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def name(self, snapshot: str) -> str:
        return snapshot

    def bring(self, snapshot: str) -> None:
        pass

    def explain(self, snapshot: str, error: RefServerError) -> str:
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


class UploadedSnapshots:
    """Uploads snapshots to the server: as weights of a run of their own, since no worker may sample with them.

    The server removes old versions. So the trainer keeps those that it may need again in its own directory, `root`.
    """

    def __init__(self, root: Path, client: RefServerClient, run: str, lineage: str) -> None:
        self._root = root
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


def choose_place(weights: WeightsPlace, root: Path, client: RefServerClient, run: str, lineage: str) -> SnapshotPlace:
    places: Mapping[WeightsPlace, Callable[[], SnapshotPlace]] = {
        "directory": lambda: SharedRoot(root),
        "server": lambda: UploadedSnapshots(root, client, run, lineage),
    }
    return places[weights]()
