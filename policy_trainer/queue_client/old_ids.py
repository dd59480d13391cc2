"""Ids in the ledger whose ack was never answered: the server says which of their batches are done."""

from collections import Counter
from collections.abc import Callable, Iterable
from http import HTTPStatus

import structlog

from policy_trainer.queue_client.ledger import Ledger
from shared.api import State
from shared.client import RefServerClient, RefServerError

log = structlog.get_logger()

# States of batches that come again by themselves, and are acked then.
_COMING = (State.QUEUED, State.SCORING, State.READY, State.LEASED)


def drop_done(client: RefServerClient, ledger: Ledger, ids: Iterable[str], stopped: Callable[[], bool]) -> None:
    """Asks the server for each id, and removes from the ledger those whose batch is done.

    A checkpoint is written before its batches are acked, so the ids that a run resumes with are mostly done. Ids that
    are expired, dead or unknown stay: a person may requeue a batch, or this may be another server than before, and a
    batch that the weights hold must not train twice. They are told once.
    """
    left: Counter[str] = Counter()
    for id in ids:
        if stopped():
            return
        state = _state(client, id)
        if state is State.DONE:
            ledger.drop([id])
        elif state not in _COMING:
            left[state or "unknown"] += 1
    if left:
        log.warning(
            "batches that the weights hold were never acknowledged. They stay in the ledger, so that they cannot train "
            "twice; unknown ones may be of another server or another --data-dir",
            **left,
        )


def _state(client: RefServerClient, id: str) -> State | None:
    """None if the server does not know the batch."""
    try:
        return client.batch(id).state
    except RefServerError as error:
        if error.status == HTTPStatus.NOT_FOUND:
            return None
        raise
