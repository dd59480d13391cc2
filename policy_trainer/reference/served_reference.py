"""The reference on the server: looked at, and replaced by a snapshot."""

import time
from pathlib import Path

from shared.api import ModelInfo
from shared.client import RefServerClient, RefServerError
from shared.client.connection import OnWait
from shared.errors import UserError

# Somebody is replacing the reference at this moment: these pass.
_PASSING = ("busy", "older_version")
_BUSY_SECONDS = 0.5


class ServedReference:
    """root: the directory of snapshots as this process sees it. on_wait: what it raises ends a wait."""

    def __init__(self, client: RefServerClient, root: Path, on_wait: OnWait) -> None:
        self._client = client
        self._root = root
        self._on_wait = on_wait

    def look(self) -> ModelInfo:
        return self._client.model()

    def replace(self, snapshot: str, version: int) -> int:
        """Has the server score with a snapshot in that version, or in the next it takes: which. Repeating is harmless.

        Raises UserError when the server cannot.
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
                if error.code not in _PASSING:
                    raise UserError(self._why(snapshot, error)) from error
            self._on_wait("the reference server, which replaces its reference", time.monotonic() - began)
            time.sleep(_BUSY_SECONDS)

    def _why(self, snapshot: str, error: RefServerError) -> str:
        if error.code == "no_snapshot_root":
            return (
                "reference.sync_steps: the server takes no other reference: start ref-server with --snapshot-root "
                f"{self._root}"
            )
        if error.code == "not_found":
            return (
                f"reference.snapshot_root: the server does not find {snapshot} below its --snapshot-root; "
                f"is {self._root} the same directory?"
            )
        return f"reference.sync_steps: the server does not take {snapshot}: {error}"
