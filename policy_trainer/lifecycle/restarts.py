"""A child process that is started again when it dies, until that no longer helps."""

import math
import threading
import time
from collections.abc import Callable

from policy_trainer.lifecycle.endings import RunFailed
from policy_trainer.lifecycle.processes import Child

# After this many deaths in a row, a restart does not help.
_MAX_DEATHS = 5
# Exit status of a command that refuses its settings or data: another start would end the same way.
_REFUSED = 2


class RestartedChild:
    """Restarts a child that has died, after pauses of 1, 2, 4 and 8 seconds. Safe to check from any thread."""

    def __init__(
        self, child: Child, note: Callable[[str], None], *, futile: str = "", lasting: float = math.inf
    ) -> None:
        """futile: in the last error, what the child did not do. lasting: seconds of a life after which deaths are
        counted anew, besides `succeeded`."""
        self._child = child
        self._note = note
        self._futile = futile
        self._lasting = lasting
        self._deaths = 0
        self._born = 0.0
        self._not_before = 0.0
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        return self._child.pid

    @property
    def epitaph(self) -> str | None:
        """How the child died, with its last output; None while it runs."""
        status = self._child.exit_status
        if status is None:
            return None
        return f"the {self._child.name} died with status {status}; its last output:\n{self._child.last_words()}"

    def start(self) -> None:
        self._not_before, self._born = 0.0, time.monotonic()
        self._child.start()

    def check(self) -> None:
        """Starts a dead child again, after a pause. Raises RunFailed if that does not help."""
        with self._lock:
            epitaph = self.epitaph
            if epitaph is None:
                return
            if not self._not_before:
                self._rest(epitaph)
            if time.monotonic() >= self._not_before:
                self.start()

    def succeeded(self) -> None:
        """Call it when the child has done its work: deaths are counted anew."""
        self._deaths = 0

    def stop(self) -> None:
        self._child.stop()

    def _rest(self, epitaph: str) -> None:
        """Notes a death, and sets the time of the next start."""
        self._deaths = 1 if time.monotonic() - self._born >= self._lasting else self._deaths + 1
        if self._child.exit_status == _REFUSED:
            raise RunFailed(epitaph)
        if self._deaths >= _MAX_DEATHS:
            raise RunFailed(f"{epitaph}\nit died {self._deaths} times{self._futile}")
        self._note(f"{epitaph}\nstarting it again")
        self._not_before = time.monotonic() + 2.0 ** (self._deaths - 1)
