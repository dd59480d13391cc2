"""The queue: what each operation guarantees, in whichever store.

A batch moves `queued -> scoring -> ready -> leased -> done`, or ends as `expired` or `dead` with a reason. Each method
of `Queue` is one operation in one transaction. A transaction first takes back expired claims and leases, so no
operation sees one that is no longer valid. The operations are written once, in SQL that both stores share
(`batches.py`, `grants.py`, `leases.py` …); `sqlite/` and `postgres/` hold what differs: how a transaction is run, what
makes it durable, and which clock it uses. The queue knows no HTTP and no tensors: payloads are bytes, and so
are the scores that it stores next to them.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from ref_server.metrics import Activity
from ref_server.queue import batches, catalog, grants, housekeeping, leases, lineages, payloads, run_metrics
from ref_server.queue.errors import NoUnusedRoom
from ref_server.queue.records import Claim, DiskSpace, Payload, Stats, Upload, Wanted, WantedReference
from ref_server.queue.run_metrics import Curve, Point
from ref_server.queue.transaction import Database, Transaction
from shared.api import (
    BatchDetails,
    BatchPage,
    Kind,
    Lease,
    LeaseBody,
    LeaseKey,
    LimitsView,
    ListOrder,
    MetricsRecord,
    Outcome,
    PurgeBody,
    Purged,
    State,
    Uploaded,
)

T = TypeVar("T")

RETENTION_SECONDS = 30 * 86_400.0
WAITING_SECONDS = 7 * 86_400.0


class Queue(ABC):
    """The durable queue of batches. Its stores are SqliteQueue and PostgresQueue.

    Methods block and may be called from any thread. They return after their change is committed; those that admit or
    settle a batch return once the change survives a power cut. Any of them raises StorageFull if the disk is full and
    StorageBroken if the store cannot be used.

    activity: counts of its events since this process opened it. retention_seconds: how long a settled batch's id stays
    known. max_waiting_seconds: how long a batch waits untouched before it expires.
    """

    # None: claims do not expire while this process lives.
    _claim_seconds: float | None = None

    def __init__(self, limits: LimitsView, retention_seconds: float, max_waiting_seconds: float) -> None:
        self._limits = limits
        self._retention_seconds = retention_seconds
        self._max_waiting_seconds = max_waiting_seconds
        self._scorer = secrets.token_hex(8)
        self.activity = Activity()

    def put(self, upload: Upload) -> Uploaded:
        """Admits a batch durably. One whose lineage is finished or has lost the run expires and loses its payload.

        If stored payloads reach their limit, those of settled batches are deleted, the longest settled first.

        Raises QueueFull, ContentConflict, EpochAhead.
        """
        return self._store(len(upload.body), lambda tx: batches.put(tx, upload), durable=True)

    def put_displacing(self, upload: Upload) -> list[str]:
        """Admits a batch as `put` does; if there is no room, expires the run's oldest waiting batches to make some.

        They expire with reason `displaced`, their payloads are deleted, and their ids are returned, oldest first.
        Batches that are leased or being scored stay. Raises QueueFull, and expires nothing, if that is not enough.
        """
        return self._store(len(upload.body), lambda tx: batches.put_displacing(tx, upload), durable=True)

    def take(self, run: str) -> Payload | None:
        """The payload of the freshest ready batch of a run without lineages.

        The batch is durably marked done first: at-most-once delivery.
        """
        if not self._run(lambda tx: batches.any_ready(tx, run)):
            return None  # trainers poll every second: an empty answer must not cost a disk flush
        return self._run(lambda tx: batches.take(tx, run), durable=True)

    def claim(self, max_tokens: int, reference_version: int = 0) -> list[Claim]:
        """Claims queued batches for scoring, oldest first: as many as fit max_tokens (P + C each), but at least one.

        Returns no claims if the wanted reference has another version than `reference_version`.
        """
        return self._run(lambda tx: batches.claim(tx, max_tokens, reference_version))

    def want_reference(self, wanted: WantedReference) -> WantedReference:
        """Makes this the reference of all servers, durably, unless its version is no higher. Returns the wanted one."""
        return self._run(lambda tx: batches.want_reference(tx, wanted), durable=True)

    def wanted_reference(self) -> WantedReference | None:
        """None as long as no weights have replaced those of `--model`."""
        return self._run(batches.wanted_reference)

    def complete(self, id: str, scores: bytes) -> None:
        """Stores the scores of a claimed batch next to its payload, makes it ready. Raises KeyError, WrongState."""
        self._run(lambda tx: batches.complete(tx, id, scores), stores=True)

    def fail(self, id: str, error: str) -> State:
        """Records a failed scoring: queues the batch again, or makes it dead after max_scoring_attempts failures.

        Raises KeyError, WrongState.
        """
        return self._run(lambda tx: batches.fail(tx, id, error))

    def lease(self, request: LeaseBody) -> list[Lease]:
        """Leases ready batches: up to request.count (default 1), or fewer, as are ready and may be in flight.

        At most MAX_LEASE_BYTES of payload, unless a single batch is larger. First expires what the request makes stale
        or abandoned. A request_id that already holds leases gets those again. A request that names a
        run gives the run to the request's lineage: waiting batches of the run's other lineages are abandoned.

        Raises RunTaken while another lineage is present, Superseded, TooManyInFlight if not one may be in flight.
        """
        return self._run(lambda tx: grants.lease(tx, request))

    def count_leasable(self, waiting: Mapping[Wanted, int], alive: Collection[tuple[str, str]]) -> dict[Wanted, int]:
        """How many batches could be leased now to waiting requests: at most as many as wait; zeros are left out.

        waiting: how many requests want which batches. alive: runs and lineages that are present, because they wait.
        """
        return self._run(lambda tx: grants.count_leasable(tx, waiting, alive))

    def ack(self, keys: Sequence[LeaseKey], checkpoint: str | None = None) -> list[Outcome]:
        """Settles leased batches as done, durably. Batches with recorded training data keep their payloads, up to
        keep_samples of a run.
        """
        return self._run(lambda tx: leases.ack(tx, keys, checkpoint), durable=True)

    def put_training(self, id: str, training: bytes) -> None:
        """Stores training data of a leased batch (`shared.batch.Training`) next to its payload, or replaces it.

        A lease that ends without an ack deletes it. Raises KeyError, QueueFull, and WrongState if the batch is neither
        leased nor kept.
        """
        self._store(len(training), lambda tx: payloads.put_training(tx, id, training), durable=False)

    def training(self, id: str) -> bytes | None:
        """The training data of a batch; None if none was stored, or the payload is deleted."""
        return self._run(lambda tx: payloads.find_training(tx, id))

    def extend(self, keys: Sequence[LeaseKey], lease_seconds: float, started: bool = False) -> list[Outcome]:
        """Makes leases end lease_seconds from now. started: training on them begins now."""
        return self._run(lambda tx: leases.extend(tx, keys, lease_seconds, started))

    def release(self, keys: Sequence[LeaseKey], error: str | None = None) -> list[Outcome]:
        """Gives batches back. This counts as a delivery only if an error is given."""
        return self._run(lambda tx: leases.release(tx, keys, error))

    def finish(self, run: str, lineage: str) -> int:
        """Ends a lineage of a run, durably: its waiting batches expire, and so do later uploads.

        The lineage's next lease undoes that. Returns how many batches expired.
        """
        return self._run(lambda tx: lineages.finish(tx, run, lineage), durable=True)

    def requeue(self, id: str) -> State:
        """Restores a dead or expired batch, with its counts at zero: ready if it was scored, else queued. Durable.

        Raises KeyError, QueueFull, and WrongState if the batch is not dead or expired, or its payload was dropped.
        """
        return self._run(lambda tx: batches.requeue(tx, id), durable=True)

    def drop(self, id: str) -> None:
        """Deletes a batch's payload, durably, and ends its lease. Its id stays known as `expired` (reason `dropped`).

        A done batch stays done, without the payload of a kept sample. Raises KeyError, and WrongState while the batch
        is being scored.
        """
        self._run(lambda tx: batches.drop(tx, id), durable=True)

    def purge(self, chosen: PurgeBody) -> Purged:
        """Drops the chosen batches that have a payload, durably, as `drop` does: a bounded part of them.

        The answer's next_cursor, if sent back, continues with the next part.
        """
        return self._run(lambda tx: housekeeping.purge(tx, chosen), durable=True)

    def tidy(self) -> bool:
        """Forgets what was settled long ago, and runs and consumers that are gone; expires what waited too long.

        Does a bounded part of it. Returns whether more may be left.
        """
        return self._run(lambda tx: housekeeping.tidy(tx, self._retention_seconds, self._max_waiting_seconds))

    def get(self, id: str) -> BatchDetails | None:
        """One batch with its history: the first events and the newest, if there were many."""
        return self._run(lambda tx: catalog.get(tx, id))

    def runs_of(self, ids: Sequence[str]) -> set[str]:
        """The runs of those of these batches that are known."""
        return self._run(lambda tx: catalog.runs_of(tx, ids))

    def payload(self, id: str) -> Payload | None:
        """A batch as it is stored. None if it is unknown or its payload deleted."""
        return self.payloads([id]).get(id)

    def payloads(self, ids: Sequence[str]) -> dict[str, Payload]:
        """By id, those of these batches whose payload is stored."""
        return self._run(lambda tx: catalog.payloads(tx, ids))

    def list(
        self,
        state: State | None,
        run: str | None,
        limit: int,
        cursor: str | None,
        order: ListOrder = ListOrder.OLDEST,
        kept: bool = False,
    ) -> BatchPage:
        """Batches by admission, without their histories. Raises ValueError for a malformed cursor.

        kept: only batches that still have their payload.
        cursor: the page continues in this order, after the last batch of the page that returned it.
        """
        return self._run(lambda tx: catalog.page(tx, state, run, limit, cursor, order, kept))

    def stats(self) -> Stats:
        return self._run(catalog.stats)

    # Metrics that trainers report. The newest may be lost at a power cut: the trainer has them, too.

    def keep_metrics(self, run: str, lineage: str, records: Sequence[MetricsRecord], after: int | None = None) -> None:
        """Stores records; each replaces an earlier one of its kind, step and name.

        after: records of later steps are deleted first.
        """
        self._run(lambda tx: run_metrics.keep(tx, run, lineage, records, after), stores=True)

    def curves(self, run: str | None = None) -> Sequence[Curve]:
        """The curves of all runs, or of one; the latest updated first."""
        return self._run(lambda tx: run_metrics.find(tx, run))

    def metrics_page(self, run: str, lineage: str, kind: Kind, after: int, limit: int) -> Sequence[Point]:
        """The records of the next steps, at most `limit` steps and about PAGE_BYTES, by step."""
        return self._run(lambda tx: run_metrics.page(tx, (run, lineage, kind), after, limit))

    def metrics_of_step(self, run: str, lineage: str, step: int, kind: Kind | None = None) -> Sequence[str]:
        """The records of one step, of all kinds or of one, as JSON."""
        return self._run(lambda tx: run_metrics.of_step(tx, run, lineage, step, kind))

    def check(self) -> None:
        """Raises StorageFull if uploads have no room, or StorageBroken if the store cannot be written now."""

        def probe(tx: Transaction) -> None:
            try:
                tx.db.check_disk(0)
            except NoUnusedRoom:
                if not payloads.any_to_drop(tx):
                    raise
            tx.execute("UPDATE probe SET written_at = ?", tx.at)

        self._run(probe, durable=True)

    def disk(self) -> DiskSpace | None:
        """The disk of the store; None if it belongs to another process."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Releases the store. Every later call raises StorageBroken."""

    @abstractmethod
    def _run(self, operation: Callable[[Transaction], T], *, durable: bool = False, stores: bool = False) -> T:
        """Runs `operation` in one transaction and returns its result after the commit.

        durable: returns once the commit survives a power cut. stores: it adds payloads, so on a full disk it gets no
        room of the reserve. The transaction begins with `_begin`; its tally is added to the activity after the commit.

        Raises what the operation raises, StorageFull, StorageBroken.
        """

    def _store(self, size: int, operation: Callable[[Transaction], T], *, durable: bool) -> T:
        """Runs an operation that stores `size` bytes.

        Payloads that have to go are dropped in transactions of their own, so that other operations run in between.
        """
        while True:
            try:
                return self._run(operation, durable=durable, stores=True)
            except payloads.MoreToDrop:
                self._run(lambda tx: payloads.make_room(tx, size))
            except NoUnusedRoom:
                if not self._run(lambda tx: payloads.drop_oldest(tx, size)):
                    raise

    def _begin(self, db: Database, now: float, at: float) -> Transaction:
        tx = self._transaction(db, now, at)
        batches.sweep(tx)
        return tx

    def _transaction(self, db: Database, now: float, at: float) -> Transaction:
        return Transaction(db, self._limits, now, at, self._scorer, self._claim_seconds)
