"""Uploading while sampling: a worker's batches go out on a thread of their own, in order."""

import queue
import threading
import time
from pathlib import Path

import structlog

from policy_trainer.outbox import Outbox
from shared import wire
from shared.batch import BatchError
from shared.client import RefServerClient, RefServerError

log = structlog.get_logger()

# Conflict, too large, invalid: the next batch may fare better.
_OF_THE_BATCH = (409, 413, 422)
_MAX_REFUSED_IN_A_ROW = 10


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
        self._refused_in_a_row = 0
        self.blocked_seconds = 0.0
        threading.Thread(target=self._work, name="delivery", daemon=True).start()

    def send(self, index: int, body: bytes) -> None:
        """Keeps a batch in the outbox, to be uploaded soon. Waits while too many wait already."""
        self._raise_failure()
        path = self._outbox.add(index, body)
        began = time.monotonic()
        while True:
            self._raise_failure()
            try:
                self._waiting.put((path, body), timeout=0.5)
                break
            except queue.Full:
                continue
        self.blocked_seconds += time.monotonic() - began

    def _raise_failure(self) -> None:
        if self._failure:
            raise self._failure

    def _work(self) -> None:
        try:
            for path, body in self._left:
                self._deliver(path, body)
            while True:
                self._deliver(*self._waiting.get())
        except Exception as error:
            self._failure = error

    def _deliver(self, path: Path, body: bytes) -> None:
        """Uploads one batch. One that the server does not take is set aside; when it takes none, that is a fault."""
        try:
            self._client.upload(body)
        except RefServerError as error:
            self._refused_in_a_row += 1
            if error.status not in _OF_THE_BATCH or self._refused_in_a_row >= _MAX_REFUSED_IN_A_ROW:
                raise
            log.warning("the server refused a batch: it is set aside", file=str(path), error=str(error))
            self._outbox.refused(path)
        else:
            self._refused_in_a_row = 0
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
