"""What comes of a lease and of an upload."""

from dataclasses import dataclass

from shared.api import Admitted
from shared.batch import RolloutBatch, ScoredBatch


@dataclass(frozen=True, eq=False)
class Leased:
    """One batch and the proof that it is ours. deliveries: counted losses before this one, plus one."""

    batch: RolloutBatch | ScoredBatch
    id: str
    token: str
    deliveries: int

    @property
    def rollout(self) -> RolloutBatch:
        return self.batch.rollout if isinstance(self.batch, ScoredBatch) else self.batch


class Uploaded(Admitted):
    created: bool
    """False when the same batch is, or was, there already."""
