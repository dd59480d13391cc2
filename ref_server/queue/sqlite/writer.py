"""Group commit: one thread owns the SQLite connection and commits the operations of many threads together.

A commit that survives a power cut costs a disk flush of some milliseconds, which all waiting operations can share. So
the thread takes every waiting operation, runs each in its own savepoint inside one transaction, commits once, and only
then answers the callers. An operation that needs a flush also waits briefly (_LINGER_SECONDS) until as many have come
as did last time. A single caller does not wait, nor does an operation that needs no flush.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import apsw
import structlog

from ref_server.metrics import Activity
from ref_server.queue.errors import StorageBroken, StorageFull

T = TypeVar("T")

log = structlog.get_logger()

_MAX_GROUP = 256
# Longest wait for other durable operations, in seconds: about one flush on a slow disk.
_LINGER_SECONDS = 0.02
_BROKEN = (
    apsw.IOError,
    apsw.ReadOnlyError,
    apsw.CorruptError,
    apsw.NotADBError,
    apsw.CantOpenError,
    apsw.PermissionsError,
    apsw.ProtocolError,
    apsw.BusyError,
)


def storage_error(error: Exception) -> Exception:
    """Translates an SQLite error to StorageFull or StorageBroken. Other errors are bugs and are returned unchanged."""
    if isinstance(error, apsw.FullError):
        return StorageFull(f"the disk is full: {error}")
    if isinstance(error, _BROKEN):
        return StorageBroken(f"the store cannot be used: {error}")
    return error


@dataclass(frozen=True, eq=False)
class _Task:
    """An operation and its caller's future.

    durable: answer only once the commit survives a power cut. stores: the operation adds payloads. On a full disk it
    fails, and operations that add none are tried again without it.
    """

    operation: Callable[[], Any]
    durable: bool
    stores: bool
    answer: Future[Any] = field(default_factory=Future)

    def refuse(self, error: Exception) -> None:
        translated = storage_error(error)
        if translated is not error:
            translated.__cause__ = error
        self.answer.set_exception(translated)


class Writer:
    """Runs operations on `db`, which nothing else may use until `close` has returned. Counts commits in `activity`."""

    def __init__(self, db: apsw.Connection, activity: Activity, give_way: Callable[[], None] = lambda: None) -> None:
        self._db = db
        self._activity = activity
        self._give_way = give_way
        self._jobs: SimpleQueue[_Task | None] = SimpleQueue()
        self._closed: str | None = None  # why no job is taken any more
        self._open: set[_Task] = set()  # taken, and not answered yet
        self._ended = False  # the None that ends the thread was taken
        self._expected = 1  # durable operations to expect in the next group
        self._putting = threading.Lock()  # no job may be put after the None that ends the thread
        self._thread = threading.Thread(target=self._work, name="queue-writer", daemon=True)
        self._thread.start()

    def call(self, operation: Callable[[], T], *, durable: bool, stores: bool = False) -> T:
        """Runs `operation`, returns its result after the commit. If it raises, only its own changes are rolled back."""
        return self.submit(operation, durable=durable, stores=stores).result()

    def submit(self, operation: Callable[[], T], *, durable: bool, stores: bool = False) -> Future[T]:
        """Queues `operation` and returns at once. The future gets the result that `call` returns."""
        job = _Task(operation, durable, stores)
        with self._putting:
            if self._closed:
                raise StorageBroken(self._closed)
            self._jobs.put(job)
        return job.answer

    def close(self) -> None:
        """Finishes the waiting operations, then ends the thread."""
        self._refuse_more("the queue is closed")
        self._thread.join()

    def _refuse_more(self, why: str) -> None:
        with self._putting:
            if self._closed is None:
                self._closed = why
                self._jobs.put(None)

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # whatever it was, the callers need an answer
            log.critical("the writer of the queue has ended with an error", exc_info=True)
            self._roll_back()
            self._refuse_more(f"the writer of the queue has ended: {error!r}")
            while not self._ended and (job := self._jobs.get()):
                self._open.add(job)
            for job in self._open:
                if not job.answer.done():
                    job.refuse(StorageBroken(self._closed))

    def _serve(self) -> None:
        durable: list[_Task] = []
        deadline = 0.0
        while not self._ended or durable:
            jobs = self._take(timeout=deadline - time.monotonic() if durable else None)
            self._open.update(jobs)
            if not durable:
                deadline = time.monotonic() + _LINGER_SECONDS
            quick = [job for job in jobs if not job.durable]
            durable += [job for job in jobs if job.durable]
            if durable and (len(durable) >= self._expected or self._ended or time.monotonic() >= deadline):
                self._commit(quick + durable)
                # As many as came now, or one more if others arrived just too late.
                came = len(durable)
                self._expected = came if self._jobs.empty() else max(came, self._expected) + 1
                durable = []
            elif quick:
                self._commit(quick)
            self._open = set(durable)
            del jobs, quick  # frees their payloads while the thread waits

    def _take(self, timeout: float | None) -> list[_Task]:
        """All waiting jobs: at least one, unless the timeout (seconds) passed or the writer was closed."""
        group: list[_Task] = []
        with suppress(Empty):
            job = self._jobs.get(timeout=timeout if timeout is None else max(0.0, timeout))
            while job is not None:
                group.append(job)
                if len(group) == _MAX_GROUP:
                    return group
                job = self._jobs.get_nowait()
            self._ended = True
        return group

    def _commit(self, group: list[_Task], *, may_retry: bool = True) -> None:
        """Runs and commits operations together. When the disk is full, those that store nothing are tried once more."""
        try:
            # SQLite takes this setting only outside a transaction. With NORMAL, a crash of the process loses nothing.
            durable = any(job.durable for job in group)
            self._db.pragma("synchronous", "FULL" if durable else "NORMAL")
            self._db.execute("BEGIN IMMEDIATE")
            answers = [self._attempt(job) for job in group]
            started = time.monotonic()
            self._db.execute("COMMIT")
            if durable:
                self._activity.flushed(time.monotonic() - started, len(group))
        except Exception as error:  # any error must reach the callers, and the thread must go on
            self._roll_back()
            again = [job for job in group if not job.stores] if may_retry and isinstance(error, apsw.FullError) else []
            for job in group:
                if job not in again:
                    job.refuse(error)
            if again:
                self._make_room()
                self._commit(again, may_retry=False)
        else:
            for answer in answers:
                answer()

    def _attempt(self, job: _Task) -> Callable[[], None]:
        """Runs one operation. Returns a function that answers its caller, to call after the commit."""
        self._db.execute("SAVEPOINT job")
        try:
            answer = partial(job.answer.set_result, job.operation())
        except Exception as error:
            if not self._db.in_transaction or (isinstance(error, apsw.FullError) and not job.stores):
                raise  # SQLite may roll back the whole transaction on a full or failing disk
            self._db.execute("ROLLBACK TO job")
            answer = partial(job.refuse, error)
        self._db.execute("RELEASE job")
        return answer

    def _make_room(self) -> None:
        """Frees a little space on a full disk, so that batches can be settled, which frees more."""
        self._give_way()
        with suppress(apsw.Error):  # the next commit shows whether it was enough
            self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_RESTART)  # the write-ahead log reuses its space

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            with suppress(apsw.Error):  # the failure that led here is the one to report
                self._db.execute("ROLLBACK")
