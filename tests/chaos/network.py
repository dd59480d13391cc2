"""2,000 uploads through a faulty network: a fifth of all requests fail.

Workers and consumers use our own client on many threads, since this tests its retries; the server is real.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from policy_trainer.trainer.queue_client.terms import LeaseTerms
from shared import wire
from shared.batch import Batch
from shared.client import Leased, RefServerClient
from tests.chaos.stage import Proof, Stage
from tests.chaos.verdicts import check_network, record_ending
from tests.harness.batches import random_batch
from tests.harness.history import History
from tests.harness.proxy import Proxy

BAR = "2,000 uploads, 20% of requests faulty: each there exactly once"

_RUN = "network"
_UPLOADS = 2000
_FAULTY = 0.2
# Most of the time is backoff: while some clients wait, others send.
_UPLOADERS = 24
_CONSUMERS = 16
_ACKED_TOGETHER = 4
# Longer than the test, so that no lease expires: a batch that is leased twice is a fault.
_LEASE_SECONDS = 600.0
_PATIENCE = 300.0


class OutOfTime(Exception):
    """Some batches were not acked in time."""


def run(stage: Stage) -> Proof:
    """The bar fixes the number of uploads, whatever the number of cycles."""
    with (
        History(stage.directory / "history.jsonl") as history,
        stage.serving_store() as server,
        Proxy(server.port, history, _FAULTY, stage.seed) as proxy,
    ):
        batches = [random_batch(stage.chance, _RUN, longest=4, completions=2) for _ in range(_UPLOADS)]
        _Traffic(proxy.url, history).send(batches)
        record_ending(history, server.url)
        return check_network(history.events(), _UPLOADS)


class _Traffic:
    """Uploaders and consumers, until every batch is acked or one of them fails."""

    def __init__(self, url: str, history: History) -> None:
        self._url = url
        self._history = history
        self._deadline = time.monotonic() + _PATIENCE
        self._acked = 0
        self._lock = threading.Lock()
        self._over = threading.Event()

    def send(self, batches: Sequence[Batch]) -> None:
        """Uploads and consumes all batches. Raises the first exception of a thread."""
        with ThreadPoolExecutor(_UPLOADERS + _CONSUMERS) as threads:
            running = [threads.submit(self._upload, batches[k::_UPLOADERS]) for k in range(_UPLOADERS)]
            running += [threads.submit(self._consume, f"consumer {k}") for k in range(_CONSUMERS)]
            try:
                wait(running, return_when=FIRST_EXCEPTION)
            finally:
                self._over.set()
        for thread in running:
            thread.result()

    def _upload(self, batches: Sequence[Batch]) -> None:
        with self._client() as client:
            for batch in batches:
                self._check_time()
                self._history.record("uploading", id=batch.id, digest=_digest(batch))
                client.upload(wire.encode(batch))
                self._history.record("uploaded", id=batch.id)

    def _consume(self, name: str) -> None:
        terms = LeaseTerms(name, _RUN, 0, None, _LEASE_SECONDS)
        with self._client() as client:
            while not self._over.is_set():
                if leased := self._lease(client, terms):
                    client.extend(leased, _LEASE_SECONDS, started=True)
                    acked = len(client.ack(leased, "a checkpoint"))
                    with self._lock:
                        self._acked += acked
                        if self._acked >= _UPLOADS:
                            self._over.set()

    def _lease(self, client: RefServerClient, terms: LeaseTerms) -> list[Leased]:
        """Up to _ACKED_TOGETHER batches; fewer if no more are ready."""
        leases: list[Leased] = []
        while len(leases) < _ACKED_TOGETHER and not self._over.is_set():
            self._check_time()
            leased = client.lease(terms.at(0, wait_seconds=0.5))
            if leased is None:
                break
            self._history.record("consumed", id=leased.id, digest=_digest(leased.batch.without_scores()))
            leases.append(leased)
        return leases

    def _client(self) -> RefServerClient:
        return RefServerClient(self._url, patience=None, on_wait=self._wait)

    def _wait(self, reason: str, seconds: float) -> None:
        """The client's callback before a retry."""
        self._history.record("retry", reason=reason)
        self._check_time()

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline or (self._over.is_set() and self._acked < _UPLOADS):
            raise OutOfTime(f"{self._acked} of {_UPLOADS} batches were acked when the time was over")


def _digest(batch: Batch) -> str:
    """A digest of all fields of a batch."""
    return wire.content_hash(wire.encode(batch)).hex()[:16]
