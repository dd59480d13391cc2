"""Reads which reference the server scores with, and replaces it by a snapshot."""

import time

from policy_trainer.config import ENV_PREFIX
from policy_trainer.reference.places import SnapshotPlace
from shared.api import ModelInfo
from shared.batch import RolloutBatch, ScoredBatch
from shared.client import RefServerClient, RefServerError
from shared.client.connection import OnWait
from shared.client.credentials import remedy
from shared.errors import UserError

# Codes of errors to retry after: another client replaces the reference, or has just replaced it; or the server has lost
# files since they were uploaded.
_RETRIED = ("busy", "older_version", "not_whole")
_BUSY_SECONDS = 0.5


class ServedReference:
    """on_wait: called while waiting; it may raise to stop."""

    def __init__(self, client: RefServerClient, place: SnapshotPlace, on_wait: OnWait) -> None:
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
                asked = max(version, _newest_version(served) + 1)
                return self._client.replace_reference(self._place.name(snapshot), asked).reference_version
            except RefServerError as error:
                if error.code not in _RETRIED:
                    raise UserError(self._place.explain(snapshot, error)) from error
            self._on_wait("the reference server to finish another replacement", time.monotonic() - began)
            time.sleep(_BUSY_SECONDS)


def _newest_version(served: ModelInfo) -> int:
    """A server that has lost the weights which its queue wants scores with others, and takes none of that version."""
    return max(served.reference_version or 0, served.wanted_version or 0)
