"""The interface of the queue: what each method guarantees, whichever store is behind it.

A batch moves `queued -> scoring -> ready -> leased -> done`, or ends as `expired` or `dead` with a reason. Methods
block and are safe to call from any thread. They return after their change is committed; those that admit or settle a
batch return once the change survives a power cut. The queue knows no HTTP and no tensors: payloads are bytes.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from ref_server.metrics.activity import Activity
from ref_server.queue.records import Claim, DiskSpace, Lease, Stats, Upload, Wanted, WantedReference
from ref_server.queue.run_metrics import RunMetrics
from shared.api import (
    BatchDetails,
    BatchPage,
    Key,
    LeaseBody,
    ListOrder,
    Outcome,
    PurgeBody,
    Purged,
    State,
    Uploaded,
)


class Queue(Protocol):
    activity: Activity
    """Counts of its events since this process opened it."""
    metrics: RunMetrics
    """What trainers report of their runs."""

    def put(self, upload: Upload) -> Uploaded:
        """Admits a batch durably. One whose lineage is finished or has lost the run expires and loses its payload.

        Where stored payloads reach their limit, those of settled batches are deleted, the longest settled first.

        Raises QueueFull, ContentConflict, EpochAhead, StorageFull, StorageBroken.
        """
        ...

    def put_displacing(self, upload: Upload) -> list[str]:
        """Admits a batch as `put` does; if there is no room, expires the run's oldest waiting batches to make some.

        They expire with reason `displaced`, their payloads are deleted, and their ids are returned, oldest first.
        Batches that are leased or being scored stay. Raises QueueFull, and expires nothing, if that is not enough.
        """
        ...

    def take(self, run: str) -> bytes | None:
        """The payload of the freshest ready batch of a run without lineages.

        Marks it done, durably, first: at-most-once delivery.
        """
        ...

    def claim(self, max_tokens: int, reference_version: int = 0) -> list[Claim]:
        """Claims queued batches for scoring, oldest first: as many as fit max_tokens (P + C each), but at least one.

        None for a server whose weights have another version than the wanted reference.
        """
        ...

    def want_reference(self, wanted: WantedReference) -> WantedReference:
        """Makes this the reference that the servers are to score with, durably, unless its version is no higher.

        Returns the wanted one.
        """
        ...

    def wanted_reference(self) -> WantedReference | None:
        """None as long as no weights have replaced those of `--model`."""
        ...

    def complete(self, id: str, body: bytes) -> None:
        """Replaces the payload of a claimed batch by its scored form, makes it ready. Raises KeyError, WrongState."""
        ...

    def fail(self, id: str, error: str) -> State:
        """Records a failed scoring: queues the batch again, or makes it dead after max_scoring_attempts failures.

        Raises KeyError, WrongState.
        """
        ...

    def lease(self, request: LeaseBody) -> list[Lease]:
        """Leases ready batches: up to request.count, or one; fewer where fewer are ready or may be in flight.

        At most MAX_LEASE_BYTES of payload, unless one batch alone is more. First expires what the request makes stale
        or abandoned. A request_id that leases are held under answers those instead. A request with a run makes it its
        lineage's: what other lineages of the run left waiting is abandoned.
        Raises RunTaken while another lineage is present, Superseded, TooManyInFlight if not one may be in flight.
        """
        ...

    def look(self, waiting: Mapping[Wanted, int], alive: Collection[tuple[str, str]]) -> dict[Wanted, int]:
        """How many batches could be leased now to requests that wait: at most as many as wait, none left out.

        waiting: how many requests want which batches. alive: the runs and lineages that are present, since they wait.
        """
        ...

    def ack(self, leases: Sequence[Key], checkpoint: str | None = None) -> list[Outcome]:
        """Settles batches as done, durably. Those that training told of keep their payloads, within keep_samples."""
        ...

    def put_training(self, id: str, training: bytes) -> None:
        """Stores what training made of a leased batch, beside its payload; again replaces it.

        A lease that ends without an ack takes it away.
        Raises KeyError, WrongState if the batch is neither leased nor kept, QueueFull, StorageFull, StorageBroken.
        """
        ...

    def training(self, id: str) -> bytes | None:
        """What training made of a batch; None if it told nothing, or the payload is deleted."""
        ...

    def extend(self, leases: Sequence[Key], lease_seconds: float, started: bool = False) -> list[Outcome]:
        """Makes leases end lease_seconds from now. started: training on them begins now."""
        ...

    def release(self, leases: Sequence[Key], error: str | None = None) -> list[Outcome]:
        """Gives batches back. It counts as a delivery only if an error is given."""
        ...

    def finish(self, run: str, lineage: str) -> int:
        """Ends a lineage of a run, durably: what waits of it expires, and what comes later. Its next lease undoes that.

        Returns how many batches expired.
        """
        ...

    def requeue(self, id: str) -> State:
        """Restores a dead or expired batch, with its counts at zero: ready if it was scored, else queued. Durable.

        Raises KeyError, QueueFull, and WrongState if the batch is not dead or expired, or its payload was dropped.
        """
        ...

    def drop(self, id: str) -> None:
        """Deletes a batch's payload, durably, and ends its lease. Its id stays known as `expired` (reason `dropped`).

        A done batch stays done, without the payload of a kept sample. Raises KeyError, and WrongState while the batch
        is being scored.
        """
        ...

    def purge(self, chosen: PurgeBody) -> Purged:
        """Drops the chosen batches that have a payload, durably, as `drop` does: a bounded part of them.

        The answer's next_cursor, given back, goes on with the next part.
        """
        ...

    def tidy(self) -> bool:
        """Forgets what was settled long ago, and runs and consumers that are gone; expires what waited too long.

        Does a bounded part of it. Returns whether more may be left.
        """
        ...

    def get(self, id: str) -> BatchDetails | None:
        """One batch with its history: the first events and the newest, where there were many."""
        ...

    def runs_of(self, ids: Sequence[str]) -> set[str]:
        """The runs of those of these batches that are known."""
        ...

    def payload(self, id: str) -> bytes | None:
        """The current body of a batch, scored once ready. None if the batch is unknown or its payload deleted."""
        ...

    def payloads(self, ids: Sequence[str]) -> dict[str, bytes]:
        """The current bodies of those of these batches that have one, by id."""
        ...

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

        kept: only those whose payload is there.
        cursor: the page goes on in this order, after the last batch of the page that gave it.
        """
        ...

    def stats(self) -> Stats: ...

    def disk(self) -> DiskSpace | None:
        """The disk of the store; None where it belongs to another process."""
        ...

    def check(self) -> None:
        """Raises StorageFull when uploads have no room, or StorageBroken when the store cannot be written now."""
        ...

    def close(self) -> None: ...
