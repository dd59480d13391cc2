"""How the queue refuses, and how it fails."""


class QueueFull(Exception):
    """No room for another batch: upload again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NoRoom(QueueFull):
    """The run's share of the queue is used up, so hardly any batch of the run is admitted."""

    def __init__(self, message: str, run: str, retry_after: float = 1.0) -> None:
        super().__init__(message, retry_after)
        self.run = run


class TooManyInFlight(QueueFull):
    """Too many batches are leased and not yet settled: ack or release some."""


class ContentConflict(Exception):
    """The id is already known, with different content."""


class EpochAhead(Exception):
    """The batch's epoch is further ahead than its lineage's trainer can be, so nobody would ever lease it."""


class WrongState(Exception):
    """The batch is not in a state that allows this."""


class Superseded(Exception):
    """A newer incarnation of the consumer has taken over; this one gets no more leases."""


class RunTaken(Exception):
    """Another lineage holds the run. It is present for `retry_after` seconds more, unless it is heard again."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StorageFull(Exception):
    """The disk is full. The operation changed nothing."""


class NoUnusedRoom(StorageFull):
    """The disk is full, but room within the store's own file would do."""


class StorageBroken(Exception):
    """The store cannot be read or written."""
