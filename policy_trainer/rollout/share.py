"""A worker's share of the groups that the next step trains on, with max_lag = 0."""

from policy_trainer.rollout.outbox import Outbox
from policy_trainer.weights.published.publication import Publication
from shared.api import State
from shared.client import RefServerClient, RefServerError


class StepShare:
    """The groups that a worker has sampled with the weights of one version.

    Which problems they are, and which are sampled together, follows from the publication: a worker that is started
    again samples the same groups, bit for bit, and the trainer takes each problem only once.
    """

    def __init__(self, worker: int, workers: int) -> None:
        self._worker = worker
        self._workers = workers
        self._version: tuple[str, int, int] | None = None
        self._sampled = 0
        self._refused = 0
        self._bodies: list[bytes] = []

    def left(self, publication: Publication, outbox: Outbox) -> int:
        """How many groups this worker still has to sample with these weights. A refused one is replaced by another."""
        version = (publication.lineage, publication.epoch, publication.version)
        if version != self._version:
            if outbox.waiting:  # those of an earlier process are uploaded first: the same problems may come again
                return 0
            self._version, self._sampled, self._refused, self._bodies = version, 0, outbox.refusals, []
            outbox.begin_at(publication.next_index)
        first = (self._worker - publication.next_index) % self._workers
        share = len(range(first, publication.groups or 0, self._workers))
        return max(0, share + outbox.refusals - self._refused - self._sampled)

    def add(self, body: bytes) -> None:
        """A group that is sampled and about to be uploaded."""
        self._sampled += 1
        self._bodies.append(body)

    def upload_again(self, client: RefServerClient) -> None:
        """For a server that has lost its store. Those that it has dropped, or that are dead there, are given up, and
        `left` counts others in their place."""
        kept = [body for body in self._bodies if not _is_lost(client, body)]
        self._sampled -= len(self._bodies) - len(kept)
        self._bodies = kept


def _is_lost(client: RefServerClient, body: bytes) -> bool:
    try:
        return client.upload(body).state in (State.EXPIRED, State.DEAD)
    except RefServerError:  # refused before: `left` counts it
        return False
