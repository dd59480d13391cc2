"""The interface of the forwards that compute log-probs."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from shared.batch import TokenGroup


class LogprobForward(Protocol):
    """Computes log-probs of logits / temperature, each group at its own temperature.

    Differentiable with respect to the model's parameters where gradients are enabled.
    """

    name: str

    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        """(sum of C,) float32 log-probs of the completion tokens, in order."""
        ...

    def with_entropy(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> tuple[Tensor, Tensor]:
        """The same, and the entropy in nats of the distribution that predicted each token: float32.

        Its gradient, too, is exact. Where no loss has the entropy, that costs nothing.
        """
        ...
