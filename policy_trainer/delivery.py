"""Uploading while sampling: a worker's batches go out on a thread of their own, in order."""

import queue
import threading
import time
from pathlib import Path

from policy_trainer.client import RefServerClient
from policy_trainer.outbox import Outbox


class Delivery:
    """Uploads the batches of an outbox. At most `ahead` wait here: then sampling waits too.

    What stops an upload for good is raised by `send`, in the thread that samples.
    """

    def __init__(self, client: RefServerClient, outbox: Outbox, *, ahead: int) -> None:
        self._client = client
        self._outbox = outbox
        self._waiting: queue.Queue[tuple[Path, bytes]] = queue.Queue(maxsize=ahead)
        self._left = outbox.undelivered()  # by an earlier life; taken before this one adds to it
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
