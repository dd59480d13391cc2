"""Names the problems that are left out."""

from typing import Any

import structlog

log = structlog.get_logger()

# Every row of a large file may have a reason of its own.
_MOST = 10


class LeftOut:
    """Logs why problems are left out: each reason once, and no more than the first ten."""

    def __init__(self, event: str) -> None:
        self._event = event
        self._named = set[str]()

    def note(self, error: Exception, **details: Any) -> None:
        """details: logged with the reason."""
        reason = str(error)
        if reason in self._named or len(self._named) >= _MOST:
            return
        self._named.add(reason)
        log.warning(self._event, **details, reason=reason)
        if len(self._named) == _MOST:
            log.warning(f"{self._event}: further ones are only counted")
