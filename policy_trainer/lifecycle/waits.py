"""When to report a wait."""

import structlog

log = structlog.get_logger()

# Shorter waits are not reported.
_QUIET_SECONDS = 3.0


class Patience:
    """Decides when to report a wait: after _QUIET_SECONDS, and then each time it has become twice as long."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._next = _QUIET_SECONDS

    def is_over(self, seconds: float) -> bool:
        """Whether to report the wait now. seconds: how long it has lasted; fewer than last time means a new wait."""
        if seconds < self._seconds:
            self._next = _QUIET_SECONDS
        self._seconds = seconds
        if seconds < self._next:
            return False
        self._next = 2 * seconds
        return True


class LoggedWait:
    """Called while something is waited for: logs long waits."""

    def __init__(self) -> None:
        self._patience = Patience()

    def __call__(self, reason: str, seconds: float) -> None:
        if self._patience.is_over(seconds):
            log.info("waiting", reason=reason, seconds=round(seconds, 1))
