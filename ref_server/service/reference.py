"""The reference that this server scores with: the one that its queue wants.

`PUT /v1/reference` writes the wanted one into the store. Every server of the queue follows, one that starts later, too.
Until it has the wanted weights, a server claims no batches, so that none is scored with weights that were replaced.
"""

import threading
import time
from collections.abc import Callable

import structlog

from ref_server.background import BackgroundLoop
from ref_server.queue.errors import StorageBroken, StorageFull
from ref_server.queue.queue import Queue
from ref_server.queue.records import WantedReference
from ref_server.scoring.loops import ScoringLoops
from ref_server.scoring.reference import (
    NoModel,
    NotReady,
    ReferenceModel,
    ReferenceRefused,
)

log = structlog.get_logger()

# How often a server looks whether another reference is wanted, and how long until it tries again to load one.
LOOK_SECONDS = 1.0
RETRY_SECONDS = 10.0
# How long `replace` waits for a thread that is loading the wanted reference.
_LOOKING_SECONDS = 1.0
_Refused = (NoModel, NotReady, ReferenceRefused)


class CurrentReference:
    """first: the weights of `--model`. on_ready: called from any thread when batches become ready.

    lacking: why this server does not have the reference that its queue wants; None when it has it.
    """

    def __init__(
        self, first: ReferenceModel, queue: Queue, *, tokens_per_forward: int, on_ready: Callable[[], None]
    ) -> None:
        self.current = first
        self.lacking: str | None = None
        self.wanted_version = first.version
        self.background = BackgroundLoop("polling for the wanted reference")
        self._queue = queue
        self._replacing = threading.Lock()
        self._refused: WantedReference | None = None
        self._retry_at = 0.0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep_following, name="reference", daemon=True)
        if (replacement := self._wanted()) is not None:
            self.current = replacement
        self.scoring = ScoringLoops(
            self.current.replicas, queue, tokens_per_forward=tokens_per_forward, on_ready=on_ready
        )

    def start(self) -> None:
        self.scoring.start()
        if self.current.scores_uploads:
            self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        self.scoring.stop()

    def replace(self, snapshot: str | None, version: int) -> int:
        """Makes a snapshot the reference of all servers of the queue; None: the weights of `--model` again.

        Returns `version` once this server scores no batch with older weights; the others follow. The current weights
        score until the new ones are loaded. Raises ReferenceRefused, NoModel, NotReady, and then changes nothing.
        """
        if not self._replacing.acquire(timeout=_LOOKING_SECONDS):
            raise ReferenceRefused("busy", "the reference is being replaced already: try again when that is over")
        try:
            wanted = WantedReference(snapshot, version, self.current.base)
            replacement = self.current.replacement(snapshot, version)
            _check_newest(wanted, self._queue.want_reference(wanted))
            self._adopt(replacement)
            self.wanted_version, self.lacking = version, None
        finally:
            self._replacing.release()
        return version

    def follow(self) -> None:
        """Takes the reference that the queue wants, if it is another and can be had."""
        if time.monotonic() < self._retry_at or not self._replacing.acquire(blocking=False):
            return
        try:
            if (replacement := self._wanted()) is not None:
                self._adopt(replacement)
                self.lacking = None
        except NotReady:
            pass  # the server is ending
        finally:
            self._replacing.release()

    def _keep_following(self) -> None:
        while not self._ending.wait(LOOK_SECONDS + self.background.pause):
            with self.background.turn():
                try:
                    self.follow()
                except (StorageFull, StorageBroken) as error:
                    log.warning("the queue cannot say which reference it wants", error=str(error))

    def _wanted(self) -> ReferenceModel | None:
        """The wanted reference, loaded; None if this server has it, or cannot have it, which `lacking` then says."""
        wanted, info = self._queue.wanted_reference(), self.current.info
        if wanted is None or not self.current.scores_uploads:
            return None
        self.wanted_version = wanted.version
        if (wanted.snapshot, wanted.version) == (info.snapshot, self.current.version):
            self.lacking = None
            return None
        name = wanted.snapshot or "the weights of --model"
        if wanted != self._refused:  # while it is tried again, the reason stays
            self.lacking = f"it loads the reference that its queue wants: {name}, version {wanted.version}"
        try:
            if wanted.base != self.current.base:
                raise ReferenceRefused("other_model", "it replaced the weights of another --model than this server's")
            return self.current.replacement(wanted.snapshot, wanted.version)
        except _Refused as error:
            self.lacking = (
                f"it cannot have the reference that its queue wants, {name}, version {wanted.version}: {error}; PUT "
                f"/v1/reference a version above {wanted.version}, with the snapshot null for the weights of --model"
            )
            log.error("no batch is scored here", reason=self.lacking)
            self._refused = wanted
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return None

    def _adopt(self, replacement: ReferenceModel) -> None:
        self.scoring.replace(replacement.replicas)
        self.current = replacement


def _check_newest(requested: WantedReference, wanted: WantedReference) -> None:
    """Raises ReferenceRefused unless the request is what is wanted already, or newer."""
    same = (requested.snapshot, requested.version) == (wanted.snapshot, wanted.version)
    if not same and requested.version <= wanted.version:
        message = f"version must be greater than {wanted.version}, which is in place; got {requested.version}"
        raise ReferenceRefused("older_version", message)
