"""A run's snapshots of the policy: model directories that the server shares, or that are uploaded to it."""

from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.weights.published.publisher import is_there, upload_directory
from shared.api import WeightsName
from shared.atomic_files import VersionedDirectory
from shared.client import RefServerClient, RefServerError
from shared.errors import UserError
from shared.models import save_model
from shared.spelling import spell_setting


class Snapshots:
    """Model directories ROOT/RUN/epoch-0000-version-00000001, named by their path below the root.

    The server has the same directory.
    """

    def __init__(self, root: Path, run: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self._root = root
        self._run = run
        self._tokenizer = tokenizer
        self._versions = VersionedDirectory(root / run, "epoch-{1:04d}-version-{0:08d}")

    @property
    def newest_version(self) -> int:
        """The highest saved version, or 0. A new version must be higher, so that no name is used twice."""
        return max((version for version, _ in self._versions.by_numbers()), default=0)

    def write(self, model: PreTrainedModel, state: Mapping[str, Tensor], *, epoch: int, version: int) -> str:
        """Writes a model with this state. Returns its name once it would survive a power cut.

        Raises OSError, SafetensorError.
        """
        with self._versions.write(version, epoch) as directory:
            save_model(model, self._tokenizer, directory, state)
        return f"{self._run}/{self._versions.path(version, epoch).name}"

    def holds(self, name: str) -> bool:
        return (self._root / name).is_dir()

    def find(self, name: str) -> Path:
        """The directory of a snapshot. Raises UserError when it does not exist."""
        if not self.holds(name):
            raise UserError(
                f"reference.snapshot_root: the reference of this run, {name}, is missing from {self._root}",
                f"restore it, or start a new run with {spell_setting('model')} set to the newest checkpoint",
            )
        return self._root / name

    def remove_all_but(self, kept: Collection[str | None]) -> None:
        """Removes other snapshots of this run, but never the newest. Raises OSError where removal is not allowed."""
        self._versions.remove_old(keep=1, also=[self._root / name for name in kept if name])

    def name_on_server(self, name: str) -> str:
        return name

    def bring(self, name: str) -> None:
        """Returns when the server has all of a snapshot. Repeating it is harmless. Raises ClientError, OSError."""

    def refusal(self, name: str, error: RefServerError) -> UserError:
        """Why the server does not accept a snapshot, and what to do."""
        if error.code == "no_snapshot_root":
            return UserError(
                "reference.sync_steps: the server cannot replace its reference",
                f"start ref-server with `--snapshot-root {self._root}`",
            )
        if error.code == "not_found":
            return UserError(
                f"reference.snapshot_root: the server does not find {name} below its `--snapshot-root`",
                f"is {self._root} the same directory?",
            )
        return UserError(f"reference.sync_steps: the server does not take {name}: {error}")


class UploadedSnapshots(Snapshots):
    """Snapshots that are uploaded to the server as weights of a separate run, so that no worker samples with them.

    The server removes old versions. So the trainer keeps those that it may need again in its own directory.
    """

    def __init__(
        self, root: Path, run: str, tokenizer: PreTrainedTokenizerBase, client: RefServerClient, lineage: str
    ) -> None:
        super().__init__(root, run, tokenizer)
        self._client = client
        self._lineage = lineage

    def name_on_server(self, name: str) -> str:
        return self._address(name).snapshot

    def bring(self, name: str) -> None:
        address = self._address(name)
        if not is_there(self._client, address):
            self._client.commit_weights(address, upload_directory(self._client, address, self._root / name), {})

    def explain(self, name: str, error: RefServerError) -> str:
        return f"reference.sync_steps: the server does not take {self.name_on_server(name)}: {error}"

    def _address(self, name: str) -> WeightsName:
        numbers = self._versions.numbers(name.rpartition("/")[2])
        assert numbers is not None
        version, epoch = numbers
        return WeightsName(f"{self._run}.reference", self._lineage, epoch, version)
