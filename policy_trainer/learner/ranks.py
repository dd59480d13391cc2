"""Who computes which groups of a step: one process all of them, or the ranks of a sharded policy a share each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from policy_trainer.learner.micro_batches import cut
from shared.batch import TokenGroup


@dataclass(frozen=True)
class Part:
    """The groups of one forward, by their places in the step. counts: False where the forward has no weight, and only
    keeps this rank in step with others."""

    places: Sequence[int]
    counts: bool = True


class Ranks(Protocol):
    def parts(self, groups: Sequence[TokenGroup], limit: int) -> Iterator[Part]:
        """This rank's forwards, as many as every other rank's, each of at most `limit` tokens or of one larger group.

        A backward of one is done before the next is asked for.
        """
        ...

    def gather(self, own: Tensor) -> list[Tensor]:
        """The tensors, of one shape on the CPU, that the ranks gave, in their order."""
        ...


class OneProcess:
    """All groups, in their order."""

    def parts(self, groups: Sequence[TokenGroup], limit: int) -> Iterator[Part]:
        for part in cut([group.tokens for group in groups], limit):
            yield Part(range(part.start, part.stop))

    def gather(self, own: Tensor) -> list[Tensor]:
        return [own]
