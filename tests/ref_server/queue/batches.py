"""Short ways to upload, score and lease batches, for the tests of either store."""

from hashlib import sha256

from ref_server.queue.queue import Queue
from ref_server.queue.records import Upload
from shared.api import BatchDetails, Lease, LeaseBody, LeaseKey, State
from tests.ref_server.queue.backends import Clock

LEASE_SECONDS = 10.0


def upload(
    id: str,
    *,
    run: str = "run",
    lineage: str = "",
    epoch: int = 0,
    version: int = 0,
    tokens: int = 10,
    body: bytes = b"raw",
    uploader: str = "",
    to_score: bool = True,
) -> Upload:
    return Upload(
        id=id,
        content_hash=sha256(body).digest(),
        run=run,
        lineage=lineage,
        epoch=epoch,
        policy_version=version,
        prompt_tokens=4,
        completion_tokens=tokens - 4,
        completions=2,
        body=body,
        uploader=uploader,
        to_score=to_score,
    )


def ready_upload(id: str, size: int = 10, run: str = "run") -> Upload:
    """Of `size` bytes; it is ready without being scored."""
    return upload(id, run=run, body=b"." * size, to_score=False)


def make_ready(queue: Queue, *uploads: Upload) -> None:
    for each in uploads:
        queue.put(each)
    while claims := queue.claim(1_000_000):
        for claim in claims:
            queue.complete(claim.id, b"scores.")


def lease_many(queue: Queue, consumer: str = "trainer", **request) -> list[Lease]:
    return queue.lease(LeaseBody(consumer=consumer, **{"lease_seconds": LEASE_SECONDS, **request}))


def lease(queue: Queue, consumer: str = "trainer", **request) -> Lease:
    """A lease of one batch, which must be ready."""
    (held,) = lease_many(queue, consumer, **request)
    return held


def key(held: Lease) -> LeaseKey:
    return LeaseKey(id=held.id, token=held.token)


def drain(queue: Queue, **request) -> list[str]:
    """The ids in the order in which they are leased."""
    return [held.id for leases in iter(lambda: lease_many(queue, **request), []) for held in leases]


def lose(queue: Queue, clock: Clock, *, started: bool, **request) -> None:
    """Leases one batch and lets the lease expire."""
    held = lease(queue, **request)
    queue.extend([key(held)], LEASE_SECONDS, started=started)
    clock.advance(LEASE_SECONDS)


def expire_waiting(queue: Queue, run: str = "run") -> None:
    """Makes all waiting batches of version 0 stale."""
    queue.lease(LeaseBody(consumer="trainer", run=run, policy_version=9, max_lag=0))


def details(queue: Queue, id: str) -> BatchDetails:
    batch = queue.get(id)
    assert batch is not None
    return batch


def state(queue: Queue, id: str) -> State:
    return details(queue, id).state


def reason(queue: Queue, id: str) -> str | None:
    return details(queue, id).reason


def stored(queue: Queue) -> int:
    """Bytes of all payloads."""
    return sum(depth.bytes for states in queue.stats().runs.values() for depth in states.values())
