"""What a queue of batches promises, whatever stores it.

A batch moves `queued -> scoring -> ready -> leased -> done`, or ends as `expired` or `dead` with a reason. Methods
block, are safe to call from any thread, and return only when what they say is true; those that admit or settle a batch
return once that survives a power cut. The queue knows no HTTP and no tensors: payloads are bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ref_server.metrics.activity import Activity
from shared.api import BatchDetails, BatchPage, Depth, Key, LeaseBody, Outcome, State, Uploaded

# What a cursor of a page looks like.
CURSOR = "^[0-9a-f]{1,15}$"


class QueueFull(Exception):
    """No room for another batch: upload again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NoRoom(QueueFull):
    """So much waits that hardly any other batch is admitted, whatever its run."""


class TooManyInFlight(QueueFull):
    """So many batches are leased and not yet settled that no more are: ack or release some."""


class ContentConflict(Exception):
    """The id is known with other content."""


class WrongState(Exception):
    """The batch is not in a state that allows this."""


class Superseded(Exception):
    """A newer incarnation of the consumer has asked since: this one is over."""


class StorageFull(Exception):
    """The disk has no room: nothing was kept of what was asked."""


class StorageBroken(Exception):
    """The store cannot be read or written."""


@dataclass(frozen=True)
class Upload:
    """A checked batch on its way in. content_hash: 32 bytes. completions: G. to_score: else it is ready at once."""

    id: str
    content_hash: bytes
    run: str
    epoch: int
    policy_version: int
    prompt_tokens: int
    completion_tokens: int
    completions: int
    body: bytes
    to_score: bool = True


@dataclass(frozen=True)
class Claim:
    """One batch handed to the scorer. attempts: that failed before. interruptions: servers that ended scoring it."""

    id: str
    body: bytes
    attempts: int
    interruptions: int


@dataclass(frozen=True)
class Lease:
    """The exclusive right to one batch, proved by its token. deliveries: counted losses before this one, plus one."""

    id: str
    token: str
    lease_seconds: float
    deliveries: int
    body: bytes


@dataclass(frozen=True)
class Stats:
    """runs: the depths of each run, only of states that have batches. oldest_age: seconds, of the oldest waiting batch.

    waiting_batches, waiting_bytes: what counts against `max_batches` and `max_bytes`.
    """

    runs: dict[str, dict[State, Depth]]
    oldest_age: float | None
    waiting_batches: int
    waiting_bytes: int


class Queue(Protocol):
    activity: Activity
    """What it has done since this process opened it."""

    def put(self, upload: Upload) -> Uploaded:
        """Admits a batch durably. Raises QueueFull, ContentConflict, StorageFull, StorageBroken."""
        ...

    def put_displacing(self, upload: Upload) -> list[str]:
        """Admits a batch as `put` does. Where there is no room, its run's oldest waiting batches make it.

        Those expire (reason `displaced`), their payloads are gone, and their ids are returned, oldest first; batches
        that are leased or being scored stay. When even that makes no room it raises QueueFull, and all stay.
        """
        ...

    def take(self, run: str) -> bytes | None:
        """The payload of the freshest ready batch of a run, which is durably done before: delivered at most once."""
        ...

    def claim(self, max_tokens: int) -> list[Claim]:
        """Takes queued batches for scoring, oldest first, as many as fit max_tokens (P + C each) but at least one."""
        ...

    def complete(self, id: str, body: bytes) -> None:
        """Replaces the payload of a claimed batch by its scored form: it is ready. Raises KeyError, WrongState."""
        ...

    def fail(self, id: str, error: str) -> State:
        """Notes a failed scoring: the batch is queued again, or dead once max_scoring_attempts have failed.

        Raises KeyError, WrongState.
        """
        ...

    def lease(self, request: LeaseBody) -> Lease | None:
        """Leases one ready batch, or None. Expires what the request shows to be stale or abandoned.

        Raises Superseded, TooManyInFlight.
        """
        ...

    def ack(self, leases: Sequence[Key], checkpoint: str | None = None) -> list[Outcome]:
        """Settles batches as done, durably."""
        ...

    def extend(self, leases: Sequence[Key], lease_seconds: float, started: bool = False) -> list[Outcome]:
        """Gives leases lease_seconds from now; `started` says that training on them begins."""
        ...

    def release(self, leases: Sequence[Key], error: str | None = None) -> list[Outcome]:
        """Gives batches back. With an error it counts as a delivery, without one it does not."""
        ...

    def requeue(self, id: str) -> State:
        """Brings a dead or expired batch back, its counts at zero: ready if it was scored, queued otherwise. Durable.

        Raises KeyError, QueueFull, and WrongState when it is neither or its payload was dropped.
        """
        ...

    def drop(self, id: str) -> None:
        """Removes a batch's payload, durably; its id stays known, as `expired` (reason `dropped`). Ends its lease.

        A done batch stays done. Raises KeyError, and WrongState while the batch is being scored.
        """
        ...

    def get(self, id: str) -> BatchDetails | None:
        """One batch with its history."""
        ...

    def payload(self, id: str) -> bytes | None:
        """The body of a batch as it stands (scored once it is ready); None when unknown or gone."""
        ...

    def list(self, state: State | None, run: str | None, limit: int, cursor: str | None) -> BatchPage:
        """Batches in order of admission, without their histories. Raises ValueError for a cursor it did not give."""
        ...

    def stats(self) -> Stats: ...

    def check(self) -> None:
        """Raises StorageFull or StorageBroken when the store cannot be written now."""
        ...

    def close(self) -> None: ...
