"""The queue in SQL: each method of the protocol is one operation in one transaction.

A transaction first takes back expired claims and leases, so no operation sees one that is no longer valid. `sqlite.py`
and `postgres.py` hold what differs between the stores: how a transaction is run, what makes it durable, and which clock
it uses.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from ref_server.metrics.activity import Activity
from ref_server.queue import (
    batches,
    catalog,
    grants,
    housekeeping,
    latest,
    leasing,
    lineages,
    purge,
    ready,
    references,
    samples,
    stored,
)
from ref_server.queue.errors import NoUnusedRoom
from ref_server.queue.records import Claim, DiskSpace, Lease, Stats, Upload, Wanted, WantedReference
from ref_server.queue.run_metrics import RunMetrics
from ref_server.queue.transaction import Database, Transaction
from shared.api import (
    BatchDetails,
    BatchPage,
    Key,
    LeaseBody,
    LimitsView,
    ListOrder,
    Outcome,
    PurgeBody,
    Purged,
    State,
    Uploaded,
)

T = TypeVar("T")

# By default. WAITING_SECONDS: how long a batch may wait untouched.
RETENTION_SECONDS = 30 * 86_400.0
WAITING_SECONDS = 7 * 86_400.0


class SqlQueue(ABC):
    """A `Queue`. `interface.py` documents the methods."""

    _claim_seconds: float | None = None

    def __init__(self, limits: LimitsView, retention_seconds: float, max_waiting_seconds: float) -> None:
        self._limits = limits
        self._retention_seconds = retention_seconds
        self._max_waiting_seconds = max_waiting_seconds
        self._scorer = secrets.token_hex(8)
        self.activity = Activity()
        self.metrics = RunMetrics(self._run)

    @abstractmethod
    def _run(self, operation: Callable[[Transaction], T], *, durable: bool = False, stores: bool = False) -> T:
        """Runs `operation` in one transaction and returns its result after the commit.

        durable: returns once the commit survives a power cut. stores: it adds payloads, so on a full disk it gets no
        room of the reserve. The transaction begins with `_begin`; its tally is added to the activity after the commit.

        Raises what the operation raises, StorageFull, StorageBroken.
        """

    @abstractmethod
    def close(self) -> None: ...

    def put(self, upload: Upload) -> Uploaded:
        return self._store(len(upload.body), lambda tx: batches.put(tx, upload), durable=True)

    def put_displacing(self, upload: Upload) -> list[str]:
        return self._store(len(upload.body), lambda tx: latest.put_displacing(tx, upload), durable=True)

    def take(self, run: str) -> bytes | None:
        if not self._run(lambda tx: latest.any_ready(tx, run)):
            return None  # trainers ask every second: an empty answer must not cost a disk flush
        return self._run(lambda tx: latest.take(tx, run), durable=True)

    def claim(self, max_tokens: int, reference_version: int = 0) -> list[Claim]:
        return self._run(lambda tx: batches.claim(tx, max_tokens, reference_version))

    def want_reference(self, wanted: WantedReference) -> WantedReference:
        return self._run(lambda tx: references.want(tx, wanted), durable=True)

    def wanted_reference(self) -> WantedReference | None:
        return self._run(references.find)

    def complete(self, id: str, body: bytes) -> None:
        self._run(lambda tx: batches.complete(tx, id, body), stores=True)

    def fail(self, id: str, error: str) -> State:
        return self._run(lambda tx: batches.fail(tx, id, error))

    def lease(self, request: LeaseBody) -> list[Lease]:
        return self._run(lambda tx: grants.lease(tx, request))

    def look(self, waiting: Mapping[Wanted, int], alive: Collection[tuple[str, str]]) -> dict[Wanted, int]:
        return self._run(lambda tx: ready.look(tx, waiting, alive))

    def ack(self, leases: Sequence[Key], checkpoint: str | None = None) -> list[Outcome]:
        return self._run(lambda tx: leasing.ack(tx, leases, checkpoint), durable=True)

    def put_training(self, id: str, training: bytes) -> None:
        self._store(len(training), lambda tx: samples.put_training(tx, id, training), durable=False)

    def extend(self, leases: Sequence[Key], lease_seconds: float, started: bool = False) -> list[Outcome]:
        return self._run(lambda tx: leasing.extend(tx, leases, lease_seconds, started))

    def release(self, leases: Sequence[Key], error: str | None = None) -> list[Outcome]:
        return self._run(lambda tx: leasing.release(tx, leases, error))

    def finish(self, run: str, lineage: str) -> int:
        return self._run(lambda tx: lineages.finish(tx, run, lineage), durable=True)

    def requeue(self, id: str) -> State:
        return self._run(lambda tx: batches.requeue(tx, id), durable=True)

    def drop(self, id: str) -> None:
        self._run(lambda tx: batches.drop(tx, id), durable=True)

    def purge(self, chosen: PurgeBody) -> Purged:
        return self._run(lambda tx: purge.purge(tx, chosen), durable=True)

    def tidy(self) -> bool:
        return self._run(lambda tx: housekeeping.tidy(tx, self._retention_seconds, self._max_waiting_seconds))

    def get(self, id: str) -> BatchDetails | None:
        return self._run(lambda tx: catalog.get(tx, id))

    def runs_of(self, ids: Sequence[str]) -> set[str]:
        return self._run(lambda tx: catalog.runs_of(tx, ids))

    def payload(self, id: str) -> bytes | None:
        return self._run(lambda tx: catalog.payload(tx, id))

    def payloads(self, ids: Sequence[str]) -> dict[str, bytes]:
        return self._run(lambda tx: catalog.payloads(tx, ids))

    def training(self, id: str) -> bytes | None:
        return self._run(lambda tx: samples.find_training(tx, id))

    def list(
        self,
        state: State | None,
        run: str | None,
        limit: int,
        cursor: str | None,
        order: ListOrder = ListOrder.OLDEST,
        kept: bool = False,
    ) -> BatchPage:
        return self._run(lambda tx: catalog.page(tx, state, run, limit, cursor, order, kept))

    def stats(self) -> Stats:
        return self._run(catalog.stats)

    def check(self) -> None:
        def probe(tx: Transaction) -> None:
            try:
                tx.db.check_disk(0)
            except NoUnusedRoom:
                if not stored.any_to_drop(tx):
                    raise
            tx.execute("UPDATE probe SET written_at = ?", tx.at)

        self._run(probe, durable=True)

    def disk(self) -> DiskSpace | None:
        return None

    def _store(self, size: int, operation: Callable[[Transaction], T], *, durable: bool) -> T:
        """Runs an operation that stores so many bytes. While others come between, it drops payloads that have to go."""
        while True:
            try:
                return self._run(operation, durable=durable, stores=True)
            except stored.MoreToDrop:
                self._run(lambda tx: stored.make_room(tx, size))
            except NoUnusedRoom:
                if not self._run(lambda tx: stored.drop_oldest(tx, size)):
                    raise

    def _begin(self, db: Database, now: float, at: float) -> Transaction:
        """now: seconds on the clock of leases. at: Unix seconds."""
        tx = self._transaction(db, now, at)
        batches.sweep(tx)
        return tx

    def _transaction(self, db: Database, now: float, at: float) -> Transaction:
        return Transaction(db, self._limits, now, at, self._scorer, self._claim_seconds)
