"""Uploads a worker's batches on threads of its own while the worker samples."""

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from itertools import islice
from pathlib import Path

import structlog

from policy_trainer.rollout.outbox import Outbox
from shared import wire
from shared.api import MAX_UPLOADS, State, Uploaded
from shared.batch import BatchError
from shared.client import RefServerClient, RefServerError
from shared.errors import UserError

log = structlog.get_logger()

# HTTP statuses that concern one batch only: conflict, too large, invalid.
_FAULTS_OF_A_BATCH = (409, 413, 422)
_MAX_REFUSED_IN_A_ROW = 10
# The server expires batches at once whose run is finished, or has become another trainer's.
_MAX_UNWANTED_IN_A_ROW = 10
# Requests at once, and the batches that share one: the server can store them with one fsync and score them in one
# forward. Only small batches share a request, which costs more than one of them does.
_AT_ONCE = 8
_REQUEST_BATCHES = MAX_UPLOADS
_REQUEST_BYTES = 2**20
# How often the delivering thread checks whether to end.
_LOOK_SECONDS = 0.5


class Delivery:
    """Uploads the batches of an outbox. When `ahead` batches wait here, `send` waits too.

    `send` and `check` raise the error of an upload that cannot succeed, in the thread that samples.
    """

    def __init__(self, client: RefServerClient, outbox: Outbox, *, ahead: int) -> None:
        self._client = client
        self._outbox = outbox
        self._waiting: queue.Queue[tuple[Path, bytes] | None] = queue.Queue(maxsize=ahead)  # None: it is closed
        # Batches of an earlier process; listed before this process adds to the outbox.
        self._left = [(path, body) for path, body in outbox.undelivered() if _is_whole(path, body)]
        self._failure: Exception | None = None
        self._refused_in_a_row = 0
        self._unwanted_in_a_row = 0
        self._closed = threading.Event()
        self.blocked_seconds = 0.0
        self._thread = threading.Thread(target=self._work, name="delivery", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops delivering. The outbox is not written any more; it keeps the batches that have not been delivered."""
        self._closed.set()
        with suppress(queue.Full):  # else the thread waits for nothing
            self._waiting.put_nowait(None)
        self._thread.join()

    def check(self) -> None:
        """Raises UserError after many batches in a row that the server expired as soon as they came."""
        self._raise_failure()
        if self._unwanted_in_a_row >= _MAX_UNWANTED_IN_A_ROW:
            raise UserError(
                f"run: the server expired the last {self._unwanted_in_a_row} batches at once: the run was finished, "
                "or another trainer of its name has taken over",
                "start this worker again with that one's config.toml",
            )

    def send(self, index: int, body: bytes) -> None:
        """Writes a batch to the outbox and queues it for upload. Waits while `ahead` batches are queued."""
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
            left = iter(self._left)
            while not self._closed.is_set():
                self._deliver([*islice(left, _REQUEST_BATCHES)] or self._next())
        except Exception as error:
            self._failure = error

    def _next(self) -> list[tuple[Path, bytes]]:
        """Waits a moment for a batch; returns it and those queued behind it, at most _REQUEST_BATCHES."""
        batches: list[tuple[Path, bytes]] = []
        with suppress(queue.Empty):
            batch = self._waiting.get(timeout=_LOOK_SECONDS)
            while batch is not None:
                batches.append(batch)
                batch = self._waiting.get_nowait() if len(batches) < _REQUEST_BATCHES else None
        return batches

    def _deliver(self, batches: list[tuple[Path, bytes]]) -> None:
        """Uploads batches at once, and records the results in the batches' order, as the outbox's cursor needs."""
        requests = iter(_requests(batches))
        while at_once := [*islice(requests, _AT_ONCE)]:
            uploads = [self._upload([body for _, body in together]) for together in at_once]
            for together, upload in zip(at_once, uploads, strict=True):
                while not wait([upload], timeout=_LOOK_SECONDS).done:
                    if self._closed.is_set():
                        return
                self._record([path for path, _ in together], upload.result())

    def _upload(self, bodies: list[bytes]) -> "Future[list[Uploaded | RefServerError]]":
        """Uploads on a daemon thread: the end of the process waits for an executor's threads, but not for these."""
        answer: Future[list[Uploaded | RefServerError]] = Future()

        def work() -> None:
            try:
                answer.set_result(self._client.upload_several(bodies))
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=work, name="upload", daemon=True).start()
        return answer

    def _record(self, paths: Sequence[Path], results: Sequence[Uploaded | RefServerError]) -> None:
        """Records deliveries, and sets refused batches aside. Raises other errors, and the last of many refusals."""
        delivered: list[Path] = []
        try:
            for path, result in zip(paths, results, strict=True):
                if isinstance(result, Uploaded):
                    self._refused_in_a_row = 0
                    self._unwanted_in_a_row = self._unwanted_in_a_row + 1 if result.state == State.EXPIRED else 0
                    delivered.append(path)
                else:
                    self._set_aside(path, result)
        finally:
            self._outbox.delivered(delivered)

    def _set_aside(self, path: Path, error: RefServerError) -> None:
        self._refused_in_a_row += 1
        if error.status not in _FAULTS_OF_A_BATCH or self._refused_in_a_row >= _MAX_REFUSED_IN_A_ROW:
            raise error
        log.warning("the server refused a batch, which is set aside", file=str(path), error=str(error))
        self._outbox.refused(path)


def _requests(batches: Sequence[tuple[Path, bytes]]) -> list[list[tuple[Path, bytes]]]:
    """Divides batches into those of one request each."""
    requests: list[list[tuple[Path, bytes]]] = []
    size = 0
    for path, body in batches:
        size += len(body) + wire.LENGTH_BYTES
        if not requests or size > _REQUEST_BYTES:
            requests.append([])
            size = len(body) + wire.LENGTH_BYTES
        requests[-1].append((path, body))
    return requests


def _is_whole(path: Path, body: bytes) -> bool:
    """Whether a batch can be read. A power cut may leave one that cannot; it is removed and its problem is skipped."""
    try:
        wire.decode(body)
    except BatchError as error:
        log.warning("a batch was lost in a power cut", file=str(path), error=str(error))
        path.unlink()
        return False
    return True
