"""All scoring loops of a server: one for each replica of the reference model, none without a model."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import structlog

from ref_server.metrics import ScoringTotals
from ref_server.queue.queue import Queue
from ref_server.scoring.jobs import ScoringGate
from ref_server.scoring.loop import ScoringLoop
from ref_server.scoring.reference import NoModel, Replica, Scores
from shared.api import State
from shared.batch import TokenGroup

log = structlog.get_logger()


class ScoringLoops:
    """Scores uploads, and direct requests. Every loop claims batches for itself: a claim is a transaction, so no batch
    is scored twice.

    A loop that fails ends the server, even if others work: those finish what they have claimed. on_ready: called from
    any thread when batches become ready.
    """

    def __init__(
        self, replicas: Sequence[Replica], queue: Queue, *, tokens_per_forward: int, on_ready: Callable[[], None]
    ) -> None:
        self.totals = ScoringTotals()
        self._queue = queue
        self._stopping = False
        gate = ScoringGate()
        self._loops = [
            ScoringLoop(
                replica,
                queue,
                self.totals.of(replica.device),
                gate,
                tokens_per_forward=tokens_per_forward,
                on_ready=on_ready,
            )
            for replica in replicas
        ]

    def start(self) -> None:
        if not self._loops:  # of batches that were uploaded while there was a model
            runs = self._queue.stats().runs.values()
            unscored = (State.QUEUED, State.SCORING)
            waiting = sum(states[state].batches for states in runs for state in unscored if state in states)
            if waiting:
                log.warning("batches wait to be scored, which needs a server with --model", batches=waiting)
        for loop in self._loops:
            loop.start()

    def stop(self) -> None:
        """Takes nothing new, and finishes the current work. Returns at once; `alive` is False when that is done."""
        self._stopping = True
        for loop in self._loops:
            loop.stop()

    def join(self) -> None:
        """After `stop`: waits until the current work is finished."""
        for loop in self._loops:
            loop.join()

    @property
    def alive(self) -> bool:
        """Whether any loop runs. Without a model there is no work: True until `stop`."""
        return any(loop.alive for loop in self._loops) if self._loops else not self._stopping

    @property
    def failed(self) -> bool:
        """Whether a loop ended by an error. Only a new process can then score on its device."""
        return any(loop.failed for loop in self._loops)

    def ring(self) -> None:
        """Wakes the loops. Call it after an upload was admitted."""
        for loop in self._loops:
            loop.ring()

    def submit(self, groups: Sequence[TokenGroup], temperature: float, *, likeliest: bool = False) -> "Future[Scores]":
        """A future of the groups' scores, by the loop with the least to do. likeliest: with the likeliest tokens.

        Raises Busy, NoModel, NotReady.
        """
        if not self._loops:
            raise NoModel
        return min(self._loops, key=lambda loop: loop.load).submit(groups, temperature, likeliest=likeliest)

    def replace(self, replicas: Sequence[Replica]) -> None:
        """Scores with other replicas from now on, one for each loop. Returns once the old ones are no longer used.

        For a moment the loops have different weights. Each batch is scored by one loop, whose version it carries, and
        the queue gives none to a loop whose version it no longer wants. Raises NotReady.
        """
        answers = [loop.replace(replica) for loop, replica in zip(self._loops, replicas, strict=True)]
        for answer in answers:
            answer.result()
