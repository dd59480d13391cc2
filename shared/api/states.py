"""The states of a batch, the outcomes of a lease, and the orders in which batches are leased and listed."""

from enum import StrEnum

# Batches of the Simple-GRPO byte protocol are a run of their own: only that protocol uploads and takes them.
LEGACY_RUN = "legacy"


class State(StrEnum):
    QUEUED = "queued"
    SCORING = "scoring"
    READY = "ready"
    LEASED = "leased"
    DONE = "done"
    EXPIRED = "expired"
    DEAD = "dead"


class Outcome(StrEnum):
    """The result of an ack, extend or release for one lease."""

    OK = "ok"
    ALREADY = "already"  # settled by this same token before: a retry is harmless
    STALE = "stale"  # the token is no longer valid
    UNKNOWN = "unknown"


class Order(StrEnum):
    """Which batch is leased first."""

    FIFO = "fifo"
    FRESHEST = "freshest"


class ListOrder(StrEnum):
    """Which batch is listed first, by admission."""

    OLDEST = "oldest"
    NEWEST = "newest"
