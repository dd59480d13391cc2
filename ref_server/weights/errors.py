"""How the store of weights refuses. For its disk it raises `StorageFull` and `StorageBroken`, as the queue does."""


class NoWeights(Exception):
    """No such version, or no such file in it."""


class WeightsGone(Exception):
    """The version was removed after a newer one was published."""


class WeightsConflict(Exception):
    """The same name with other content."""


class WrongDigest(Exception):
    """A file arrived with other bytes than its Content-Digest says."""


class NotWhole(Exception):
    """A version cannot be committed: a file is missing or differs. field: of the manifest."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field
