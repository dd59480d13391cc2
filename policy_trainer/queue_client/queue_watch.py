"""A trainer's eye on the server's queue, which must not hold it up."""

import time

from policy_trainer.queue_client.server import batches_by_state, leases_are_full
from shared.api import State
from shared.client import RefServerClient

# The queue is asked for at most this often, in seconds.
_EVERY_SECONDS = 1.0
_STATES = (State.QUEUED, State.SCORING, State.READY, State.EXPIRED, State.DEAD)


class QueueWatch:
    """Batches of one run by state, as the server last said; None before it has said anything."""

    def __init__(self, client: RefServerClient, run: str) -> None:
        self._client = client
        self._run = run
        self._asked = 0.0
        self.depth: dict[str, int | None] = dict.fromkeys(_STATES)
        self.leases_full = False

    def look(self) -> None:
        """Asks anew, unless it just has, and only if the server answers at once."""
        if time.monotonic() - self._asked < _EVERY_SECONDS:
            return
        queue = self._client.glance()
        if queue is not None:
            states = batches_by_state(queue, self._run)
            self.depth = {state: states[state] for state in _STATES}
            self.leases_full = leases_are_full(queue, self._run)
        self._asked = time.monotonic()

    def wait_reason(self, workers: str) -> str:
        """Whom a trainer without batches waits for. workers: what it is when those have nothing."""
        to_score = (self.depth[State.QUEUED] or 0) + (self.depth[State.SCORING] or 0)
        if self.leases_full:
            reason = "leased batches to be settled: the reference server has as many out as it allows"
        elif to_score:
            reason = f"the reference server to score {to_score} batches"
        else:
            reason = workers
        lost = (
            f"; {self.depth[state]} batches are {state}" for state in (State.DEAD, State.EXPIRED) if self.depth[state]
        )
        return reason + "".join(lost)
