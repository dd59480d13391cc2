"""The embedded queue: one SQLite file, held by one process, written by one thread.

Every method is one transaction (see `writer.py` for how they share commits), and begins by taking back the leases whose
time is over, so that none ever sees a lease that no longer holds.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import apsw

from ref_server.queue import batches, catalog, leasing, schema
from ref_server.queue.interface import (
    Admission,
    BatchInfo,
    Claim,
    Lease,
    LeaseKey,
    LeaseRequest,
    Limits,
    Outcome,
    Page,
    State,
    Stats,
    Upload,
)
from ref_server.queue.transaction import Transaction
from ref_server.queue.writer import Writer, storage_error

T = TypeVar("T")

_DAY = 86400.0
_HOUSEKEEPING_SECONDS = 60.0


class SqliteQueue:
    """The `Queue` in the file `path`, made if there is none. See `interface.py` for what the methods promise.

    retention_seconds: how long a settled batch's id stays known. clock: seconds that never jump; leases run on it, so a
    restart, which starts another clock, gives every lease its full time again. wall: Unix seconds.
    Raises StorageBroken when the file is damaged, of an unknown schema, or held by another process.
    """

    def __init__(
        self,
        path: Path,
        *,
        limits: Limits,
        retention_seconds: float = 30 * _DAY,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._limits = limits
        self._retention_seconds = retention_seconds
        self._clock = clock
        self._wall = wall
        self._housekeeping_due = clock()
        with ExitStack() as opened:
            opened.enter_context(schema.hold(path))
            try:
                db = self._db = apsw.Connection(str(path))
                opened.callback(db.close)
                schema.prepare(db, path)
            except apsw.Error as error:
                raise storage_error(error) from error
            self._writer = Writer(db)
            opened.callback(self._writer.close)
            self._writer.call(self._recover, durable=False)
            self._opened = opened.pop_all()

    def put(self, upload: Upload) -> Admission:
        return self._run(lambda tx: batches.put(tx, upload), durable=True)

    def claim(self, max_tokens: int) -> list[Claim]:
        return self._run(lambda tx: batches.claim(tx, max_tokens))

    def complete(self, id: str, body: bytes) -> None:
        self._run(lambda tx: batches.complete(tx, id, body))

    def fail(self, id: str, error: str) -> State:
        return self._run(lambda tx: batches.fail(tx, id, error))

    def lease(self, request: LeaseRequest) -> Lease | None:
        return self._run(lambda tx: leasing.lease(tx, request))

    def ack(self, leases: Sequence[LeaseKey], checkpoint: str | None = None) -> list[Outcome]:
        return self._run(lambda tx: leasing.ack(tx, leases, checkpoint), durable=True)

    def extend(self, leases: Sequence[LeaseKey], lease_seconds: float, started: bool = False) -> list[Outcome]:
        return self._run(lambda tx: leasing.extend(tx, leases, lease_seconds, started))

    def release(self, leases: Sequence[LeaseKey], error: str | None = None) -> list[Outcome]:
        return self._run(lambda tx: leasing.release(tx, leases, error))

    def requeue(self, id: str) -> State:
        return self._run(lambda tx: batches.requeue(tx, id), durable=True)

    def drop(self, id: str) -> None:
        self._run(lambda tx: batches.drop(tx, id), durable=True)

    def get(self, id: str) -> BatchInfo | None:
        return self._run(lambda tx: catalog.get(tx, id))

    def payload(self, id: str) -> bytes | None:
        return self._run(lambda tx: catalog.payload(tx, id))

    def list(self, state: State | None, run: str | None, limit: int, cursor: str | None) -> Page:
        return self._run(lambda tx: catalog.page(tx, state, run, limit, cursor))

    def stats(self) -> Stats:
        return self._run(catalog.stats)

    def check(self) -> None:
        self._run(lambda tx: tx.execute("UPDATE probe SET written_at = ?", tx.at), durable=True)

    def close(self) -> None:
        """Finishes what waits; every later call raises StorageBroken."""
        self._opened.close()

    def _run(self, operation: Callable[[Transaction], T], *, durable: bool = False) -> T:
        return self._writer.call(lambda: operation(self._begin()), durable=durable)

    def _begin(self) -> Transaction:
        tx = self._moment()
        leasing.sweep(tx)
        if tx.now >= self._housekeeping_due:
            self._housekeeping_due = tx.now + _HOUSEKEEPING_SECONDS
            batches.forget(tx, older_than=tx.at - self._retention_seconds)
        return tx

    def _recover(self) -> None:
        tx = self._moment()
        batches.recover(tx)
        leasing.grant_grace(tx)

    def _moment(self) -> Transaction:
        return Transaction(self._db, self._limits, now=self._clock(), at=self._wall())
