"""The words for where a batch stands, and for what came of a lease, that a server and its clients share."""

from enum import StrEnum

# The run of the Simple-GRPO byte protocol, over which alone its batches come and go.
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
    """What became of one lease in an ack, extend or release."""

    OK = "ok"
    ALREADY = "already"  # settled by this same token before: a retry is harmless
    STALE = "stale"  # the token no longer holds
    UNKNOWN = "unknown"


class Order(StrEnum):
    FIFO = "fifo"
    FRESHEST = "freshest"
