"""What goes into the queue and comes out of it, as far as the API has no record of it."""

from dataclasses import dataclass
from typing import NamedTuple

from shared.api import Depth, LeaseBody, State

# Leases come without payloads beyond this sum: `Queue.payloads` reads those once there is room to send them.
LARGE_BYTES = 2**20
# One request leases no more payload than this, unless a single batch is larger: the answer is held in memory.
MAX_LEASE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Upload:
    """A checked batch to admit. content_hash: 32 bytes. completions: G. to_score: False makes it ready at once.

    lineage: empty for clients that name none. uploader: the name of the token; empty without one.
    """

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
    lineage: str = ""
    uploader: str = ""


class Payload(NamedTuple):
    """A batch as it is stored: what was uploaded, and what scoring added to it; None before, and without a model."""

    body: bytes
    scores: bytes | None


@dataclass(frozen=True)
class Claim:
    """A batch handed to the scorer. attempts: failed scorings so far. interruptions: servers that ended scoring it."""

    id: str
    run: str
    body: bytes
    attempts: int
    interruptions: int


@dataclass(frozen=True)
class Wanted:
    """The batches that a lease request may get: those of a lineage up to an epoch, or of any run."""

    run: str | None
    lineage: str = ""
    epoch: int | None = None

    @staticmethod
    def by(request: LeaseBody) -> "Wanted":
        return Wanted(request.run, request.lineage_name, request.epoch)


@dataclass(frozen=True)
class Stats:
    """runs: each run's depth by state, empty states left out. oldest_age: age in seconds of the oldest waiting batch.

    waiting_batches, waiting_bytes: the totals that count against `max_batches` and `max_bytes`.
    """

    runs: dict[str, dict[State, Depth]]
    oldest_age: float | None
    waiting_batches: int
    waiting_bytes: int


@dataclass(frozen=True)
class WantedReference:
    """The weights that all servers of a queue are to score with. snapshot: None for those of `--model`.

    base: fingerprint of the `--model` whose weights they replace.
    """

    snapshot: str | None
    version: int
    base: str


@dataclass(frozen=True)
class DiskSpace:
    """Bytes of a disk: those that are free, and those that uploads leave free."""

    free: int
    floor: int
