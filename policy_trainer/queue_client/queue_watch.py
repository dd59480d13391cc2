"""Polls the state of the server's queue without delaying the trainer."""

import time

from policy_trainer.queue_client.server import batches_by_state, leases_are_full, store_fills_up
from shared.api import BatchSummary, ListOrder, State
from shared.client import RefServerClient

# The least time between two requests.
_EVERY_SECONDS = 1.0
# After a request without an answer: each one holds the training loop up until it times out.
_UNANSWERED_SECONDS = 15.0
_STATES = (State.QUEUED, State.SCORING, State.READY, State.EXPIRED, State.DEAD)
_LOST = (State.DEAD, State.EXPIRED)


class QueueWatch:
    """As of the last answer, None before the first: depth: batches of one run by state. scoring_seconds: the server's
    working time since it started, for all runs.

    external: whether the samplers are not the trainer's own, and so may still sample for an epoch that has ended.
    """

    def __init__(self, client: RefServerClient, run: str, *, external: bool = False) -> None:
        self._client = client
        self._run = run
        self._external = external
        # The reason as of this number of expired batches.
        self._abandoned: tuple[int, str | None] = (0, None)
        self._not_before = 0.0
        self.depth: dict[str, int | None] = dict.fromkeys(_STATES)
        self._at_first: dict[State, int] = {}
        self.scoring_seconds: float | None = None
        self.leases_full = False
        self.store_fills_up = False

    def look(self) -> None:
        """Reads the queue, at most every _EVERY_SECONDS. It does not retry: without an answer the last counts stay."""
        if time.monotonic() < self._not_before:
            return
        queue = self._client.glance(self._run)
        if queue is not None:
            states = batches_by_state(queue, self._run)
            self.depth = {state: states[state] for state in _STATES}
            self._at_first = self._at_first or {state: states[state] for state in _LOST}
            self.scoring_seconds = queue.scoring.working_seconds
            self.leases_full = leases_are_full(queue, self._run)
            self.store_fills_up = store_fills_up(queue, self._run)
        pause = _UNANSWERED_SECONDS if queue is None else _EVERY_SECONDS
        self._not_before = time.monotonic() + pause

    def wait_reason(self, workers: str) -> str:
        """Why a trainer has no batches, as a sentence. workers: the reason when the server has nothing to do."""
        to_score = (self.depth[State.QUEUED] or 0) + (self.depth[State.SCORING] or 0)
        if self.leases_full:
            reason = "the reference server leases no more batches until some are acked: its limit is reached"
        elif to_score:
            reason = f"the reference server scores {to_score} batches"
        else:
            reason = self._why_abandoned() or workers
        lost = {state: count for state in self._at_first if (count := self._lost(state)) > 0}
        return reason + "".join(f"; batches {state} since the start: {n}" for state, n in lost.items())

    def _lost(self, state: State) -> int:
        """Batches that came to this state since the start: an earlier run of the same name may have left others."""
        return (self.depth[state] or 0) - self._at_first.get(state, 0)

    def _why_abandoned(self) -> str | None:
        """Why batches arrive but expire as abandoned; None if none do."""
        expired = self._lost(State.EXPIRED) if self._external else 0
        if expired != self._abandoned[0]:
            page = self._client.page(State.EXPIRED, self._run, limit=1, order=ListOrder.NEWEST)
            reasons = [_abandonment(batch) for batch in page.batches if batch.reason == "abandoned"]
            self._abandoned = expired, reasons[0] if reasons else None
        return self._abandoned[1]


def _abandonment(batch: BatchSummary) -> str:
    return (
        f"batches arrive but are abandoned: the newest has epoch {batch.epoch}, policy_version "
        f"{batch.policy_version}, lineage {batch.lineage!r}, which this run no longer accepts. Samplers must take "
        "lineage, epoch and policy_version from the newest published weights (docs/client.md)"
    )
