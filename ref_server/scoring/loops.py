"""The scoring loops of a server: one for each replica of the reference model, all on one queue."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ref_server.metrics.totals import ScoringTotals
from ref_server.queue.queue import Queue
from ref_server.scoring.company import Company
from ref_server.scoring.loop import ScoringLoop
from ref_server.scoring.reference import Replica, Scores
from shared.batch import TokenGroup


class ScoringLoops:
    """A `Scoring`. Every loop claims batches for itself: a claim is a transaction, so no batch is scored twice.

    A loop that fails ends the server, as the only one does: the others finish what they have claimed.
    """

    def __init__(
        self, replicas: Sequence[Replica], queue: Queue, *, tokens_per_forward: int, on_ready: Callable[[], None]
    ) -> None:
        self.totals = ScoringTotals()
        company = Company()
        self._loops = [
            ScoringLoop(
                replica,
                queue,
                self.totals.of(replica.device),
                company,
                tokens_per_forward=tokens_per_forward,
                on_ready=on_ready,
            )
            for replica in replicas
        ]

    def start(self) -> None:
        for loop in self._loops:
            loop.start()

    def stop(self) -> None:
        for loop in self._loops:
            loop.stop()

    def join(self) -> None:
        for loop in self._loops:
            loop.join()

    @property
    def alive(self) -> bool:
        return any(loop.alive for loop in self._loops)

    @property
    def failed(self) -> bool:
        return any(loop.failed for loop in self._loops)

    def ring(self) -> None:
        for loop in self._loops:
            loop.ring()

    def submit(self, group: TokenGroup, temperature: float) -> "Future[Scores]":
        """The loop with the least to do takes it."""
        return min(self._loops, key=lambda loop: loop.load).submit(group, temperature)

    def replace(self, replicas: Sequence[Replica]) -> None:
        """One for each loop. For a moment the loops have different weights. Each batch is scored by one loop, whose
        version it carries, and the queue gives none to a loop whose version it no longer wants."""
        answers = [loop.replace(replica) for loop, replica in zip(self._loops, replicas, strict=True)]
        for answer in answers:
            answer.result()
