"""One thread that owns the connection and commits what many threads ask, together.

A commit that survives a power cut costs a disk flush: some milliseconds that all who wait can share. So the thread
takes everything that waits, runs each operation in a savepoint of its own inside one transaction, commits once, and
only then tells the callers. Those who want a flush also wait, for a moment, for as many others as lately came together;
one who is alone waits for nobody, and neither does an operation that needs no flush.
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

from ref_server.metrics.activity import Activity
from ref_server.queue.interface import StorageBroken, StorageFull

T = TypeVar("T")

_MAX_GROUP = 256
# Longest wait for others who want a flush, in seconds: about what one takes on a slow disk.
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
    """What the disk did, in the queue's words; any other error is a bug and stays what it is."""
    if isinstance(error, apsw.FullError):
        return StorageFull(f"the disk is full: {error}")
    if isinstance(error, _BROKEN):
        return StorageBroken(f"the store cannot be used: {error}")
    return error


@dataclass(frozen=True)
class _Job:
    """durable: its caller may only be told once it survives a power cut."""

    operation: Callable[[], Any]
    durable: bool
    answer: Future[Any] = field(default_factory=Future)

    def refuse(self, error: Exception) -> None:
        told = storage_error(error)
        if told is not error:
            told.__cause__ = error
        self.answer.set_exception(told)


class Writer:
    """Runs operations on `db`, which nobody else may touch until `close` has returned. Commits show in `activity`."""

    def __init__(self, db: apsw.Connection, activity: Activity) -> None:
        self._db = db
        self._activity = activity
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed = False
        self._ended = False  # nothing comes any more
        self._together = 1  # operations that lately wanted a flush at the same time
        self._door = threading.Lock()  # no job may slip in behind the None that ends the thread
        self._thread = threading.Thread(target=self._work, name="queue-writer", daemon=True)
        self._thread.start()

    def call(self, operation: Callable[[], T], *, durable: bool) -> T:
        """What `operation` returns, once it is committed. What it raises rolls back itself and nothing else."""
        job = _Job(operation, durable)
        with self._door:
            if self._closed:
                raise StorageBroken("the queue is closed")
            self._jobs.put(job)
        return job.answer.result()

    def close(self) -> None:
        """Finishes what waits."""
        with self._door:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        durable: list[_Job] = []
        deadline = 0.0
        while not self._ended or durable:
            jobs = self._take(timeout=deadline - time.monotonic() if durable else None)
            if not durable:
                deadline = time.monotonic() + _LINGER_SECONDS
            quick = [job for job in jobs if not job.durable]
            durable += [job for job in jobs if job.durable]
            if durable and (len(durable) >= self._together or self._ended or time.monotonic() >= deadline):
                self._commit(quick + durable)
                self._learn(len(durable))
                durable = []
            elif quick:
                self._commit(quick)
            del jobs, quick  # their payloads must not stay in memory while nothing comes

    def _learn(self, came: int) -> None:
        """As many as came are awaited next time; one more than before as long as others were only just too late."""
        self._together = came if self._jobs.empty() else max(came, self._together) + 1

    def _take(self, timeout: float | None) -> list[_Job]:
        """All that waits: at least one job, unless the time is over or the queue closed."""
        group: list[_Job] = []
        with suppress(Empty):
            job = self._jobs.get(timeout=timeout if timeout is None else max(0.0, timeout))
            while job is not None:
                group.append(job)
                if len(group) == _MAX_GROUP:
                    return group
                job = self._jobs.get_nowait()
            self._ended = True
        return group

    def _commit(self, group: list[_Job]) -> None:
        try:
            # Only outside a transaction does SQLite take this setting. NORMAL keeps a crash of the process harmless.
            durable = any(job.durable for job in group)
            self._db.pragma("synchronous", "FULL" if durable else "NORMAL")
            self._db.execute("BEGIN IMMEDIATE")
            answers = [self._attempt(job) for job in group]
            started = time.monotonic()
            self._db.execute("COMMIT")
            if durable:
                self._activity.flushed(time.monotonic() - started, len(group))
        except Exception as error:  # whatever it is, those who wait must hear it and the thread must live on
            self._roll_back()
            for job in group:
                job.refuse(error)
        else:
            for answer in answers:
                answer()

    def _attempt(self, job: _Job) -> Callable[[], None]:
        """Runs one operation; returns how to answer its caller once the group is committed."""
        self._db.execute("SAVEPOINT job")
        try:
            answer = partial(job.answer.set_result, job.operation())
        except Exception as error:
            if not self._db.in_transaction:
                raise  # a full or failing disk can make SQLite drop the whole transaction, and with it the group
            self._db.execute("ROLLBACK TO job")
            answer = partial(job.refuse, error)
        self._db.execute("RELEASE job")
        return answer

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            with suppress(apsw.Error):  # the failure that led here is the one to report
                self._db.execute("ROLLBACK")
