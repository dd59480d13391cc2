"""A worker's share of the groups that the next step trains on, with max_lag = 0."""

from policy_trainer.rollout.outbox import Outbox
from policy_trainer.weights.publication import Publication


class StepShare:
    """Counts the groups that a worker has sampled with the weights of one version.

    Which problems they are, and which are sampled together, follows from the publication: a worker that is
    started again samples the same groups, bit for bit, and the trainer takes each problem only once.
    """

    def __init__(self, worker: int, workers: int) -> None:
        self._worker = worker
        self._workers = workers
        self._version: tuple[int, int] | None = None
        self._sampled = 0
        self._refused = 0

    def left(self, publication: Publication, outbox: Outbox) -> int:
        """How many groups this worker still has to sample with these weights. A refused one is replaced by another."""
        version = (publication.epoch, publication.version)
        if version != self._version:
            if outbox.waiting:  # those of an earlier process are uploaded first: the same problems may come again
                return 0
            self._version, self._sampled, self._refused = version, 0, outbox.refusals
            outbox.begin_at(publication.next_index)
        first = (self._worker - publication.next_index) % self._workers
        share = len(range(first, publication.groups or 0, self._workers))
        return share + outbox.refusals - self._refused - self._sampled

    def add(self, groups: int) -> None:
        """So many more have been sampled."""
        self._sampled += groups

    def start_again(self) -> None:
        """All of them have been lost."""
        self._version = None
