"""A server without a reference model: it is a queue alone, and leases batches as they were uploaded."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NoReturn

import structlog

from ref_server.metrics.totals import ScoringTotals
from ref_server.queue.queue import Queue
from ref_server.scoring.reference import NoModel, Reference, Replica, Scores, check_size
from shared.api import ModelInfo, State
from shared.batch import TokenGroup

log = structlog.get_logger()


class NoReference:
    """A `Reference` that scores nothing, and accepts any vocabulary and context."""

    scores_uploads = False
    version = 0
    base = ""
    replicas = ()

    def __init__(self, max_batch_tokens: int) -> None:
        nothing = dict.fromkeys(ModelInfo.model_fields)
        self.info = ModelInfo.model_validate({**nothing, "max_batch_tokens": max_batch_tokens})

    def check_tokens(self, group: TokenGroup) -> None:
        group.check_ids(2**63, "as token ids do")
        check_size(group, self.info.max_batch_tokens)

    def encode(self, text: str) -> list[int]:
        _refuse()

    def decode(self, ids: Sequence[int]) -> None:
        return None

    def token_texts(self, ids: Sequence[int]) -> list[None]:
        return [None] * len(ids)

    def replacement(self, snapshot: str | None, version: int) -> Reference:
        _refuse()

    def scoring(self, queue: Queue, on_ready: Callable[[], None]) -> "NoScoring":
        return NoScoring(queue)


class NoScoring:
    """A `Scoring` that scores nothing: uploads are ready at once."""

    failed = False

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self.alive = True
        self.totals = ScoringTotals()

    def start(self) -> None:
        """Warns of batches that were uploaded while there was a model: without one they never become ready."""
        unscored = (State.QUEUED, State.SCORING)
        runs = self._queue.stats().runs.values()
        waiting = sum(states[state].batches for states in runs for state in unscored if state in states)
        if waiting:
            log.warning("batches wait to be scored, which needs a server with --model", batches=waiting)

    def stop(self) -> None:
        self.alive = False

    def join(self) -> None:
        pass

    def ring(self) -> None:
        pass

    def submit(self, group: TokenGroup, temperature: float) -> "Future[Scores]":
        _refuse()

    def replace(self, replicas: Sequence[Replica]) -> None:
        _refuse()


def _refuse() -> NoReturn:
    raise NoModel("this server is a queue without a reference model; start ref-server with --model to score")
