"""Telling of a wait without repeating oneself."""

# A wait shorter than this is not worth a word.
_QUIET_SECONDS = 3.0


class Patience:
    """Says when a wait is worth a word: after some seconds, and then whenever it has lasted twice as long."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._next = _QUIET_SECONDS

    def is_over(self, seconds: float) -> bool:
        """seconds: how long the wait has lasted. Fewer than last time means that another wait has begun."""
        if seconds < self._seconds:
            self._next = _QUIET_SECONDS
        self._seconds = seconds
        if seconds < self._next:
            return False
        self._next = 2 * seconds
        return True
