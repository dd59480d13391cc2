"""Uploading while sampling: a worker's batches go out on a thread of their own, in order."""

import queue
import threading
import time
from pathlib import Path

import structlog

from policy_trainer.client import RefServerClient
from policy_trainer.outbox import Outbox
from shared import wire
from shared.batch import BatchError

log = structlog.get_logger()


class Delivery:
    """Uploads the batches of an outbox. At most `ahead` wait here: then sampling waits too.

    What stops an upload for good is raised by `send`, in the thread that samples.
    """

    def __init__(self, client: RefServerClient, outbox: Outbox, *, ahead: int) -> None:
        self._client = client
        self._outbox = outbox
        self._waiting: queue.Queue[tuple[Path, bytes]] = queue.Queue(maxsize=ahead)
        # By an earlier life; taken before this one adds to it.
        self._left = [(path, body) for path, body in outbox.undelivered() if _is_whole(path, body)]
        self._failure: Exception | None = None
        self.blocked_seconds = 0.0
        threading.Thread(target=self._work, name="delivery", daemon=True).start()

    def send(self, index: int, body: bytes) -> None:
        """Keeps a batch in the outbox, to be uploaded soon. Waits while too many wait already."""
        path = self._outbox.add(index, body)
        began = time.monotonic()
        while True:
            if self._failure:
                raise self._failure
            try:
                self._waiting.put((path, body), timeout=0.5)
                break
            except queue.Full:
                continue
        self.blocked_seconds += time.monotonic() - began

    def _work(self) -> None:
        try:
            for path, body in self._left:
                self._deliver(path, body)
            while True:
                self._deliver(*self._waiting.get())
        except Exception as error:
            self._failure = error

    def _deliver(self, path: Path, body: bytes) -> None:
        self._client.upload(body)
        self._outbox.delivered(path)


def _is_whole(path: Path, body: bytes) -> bool:
    """Whether a batch can be read. Only a power cut leaves one that cannot: it is dropped, and its problem skipped."""
    try:
        wire.decode(body)
    except BatchError as error:
        log.warning("a batch was lost in a power cut", file=str(path), error=str(error))
        path.unlink()
        return False
    return True
