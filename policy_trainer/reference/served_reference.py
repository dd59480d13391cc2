"""Reads which reference the server scores with, and replaces it by a snapshot."""

import time
from pathlib import Path

from policy_trainer.config import ENV_PREFIX
from shared.api import ModelInfo
from shared.client import RefServerClient, RefServerError
from shared.client.connection import OnWait
from shared.client.credentials import remedy
from shared.errors import UserError

# Codes of errors to retry after: another client replaces the reference, or has just replaced it.
_RETRIED = ("busy", "older_version")
_BUSY_SECONDS = 0.5


class ServedReference:
    """root: the directory of snapshots as this process sees it. on_wait: called while waiting; it may raise to stop."""

    def __init__(self, client: RefServerClient, root: Path, on_wait: OnWait) -> None:
        self._client = client
        self._root = root
        self._on_wait = on_wait

    def check_role(self) -> None:
        """Raises UserError for a token that may not replace the reference."""
        try:
            self._client.check_reference_role()
        except RefServerError as error:
            raise UserError(f"reference.sync_steps: {error}{remedy(error, ENV_PREFIX)}") from error

    def look(self) -> ModelInfo:
        return self._client.model()

    def replace(self, snapshot: str, version: int) -> int:
        """Makes the server score with a snapshot. Returns its version, which is `version` or higher.

        A repeated call changes nothing. Raises UserError when the server refuses.
        """
        began = time.monotonic()
        while True:
            served = self.look()
            if served.snapshot == snapshot:
                return served.reference_version or 0
            try:
                asked = max(version, (served.reference_version or 0) + 1)
                return self._client.replace_reference(snapshot, asked).reference_version
            except RefServerError as error:
                if error.code not in _RETRIED:
                    raise UserError(self._explain(snapshot, error)) from error
            self._on_wait("the reference server to finish another replacement", time.monotonic() - began)
            time.sleep(_BUSY_SECONDS)

    def _explain(self, snapshot: str, error: RefServerError) -> str:
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
