"""What a forward is: the protocol, and the base class of those that compute hidden states for the tiled head."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shared.batch import TokenGroup
from shared.logprobs.head import LMHead
from shared.logprobs.kept_tokens import KeptTokens, kept_tokens
from shared.logprobs.vision import vision_of


class LogprobForward(Protocol):
    """Computes log-probs of logits / temperature, each group at its own temperature, over the tokens that a group's
    sampling mask keeps.

    Differentiable with respect to the model's parameters where gradients are enabled.
    """

    name: str

    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        """(sum of C,) float32 log-probs of the completion tokens, in order."""
        ...

    def with_entropy(
        self, groups: Sequence[TokenGroup], temperatures: Sequence[float], *, entropy_grad: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The same, and the entropy in nats of the distribution that predicted each token: float32.

        entropy_grad: whether the entropy has a gradient, which is exact too. Without, the forward may be faster.
        """
        ...


class ServingForward(LogprobForward, Protocol):
    """A forward in a process that has the whole model."""

    def with_likeliest(
        self, groups: Sequence[TokenGroup], temperatures: Sequence[float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The log-probs, and for each completion token the likeliest in its place, int64, with its log-prob."""
        ...


def body_of(model: PreTrainedModel) -> nn.Module:
    """The model without its head. In some families (Llama 4) transformers' `base_model` is the model itself."""
    body = model.base_model
    return model.model if body is model else body  # type: ignore[return-value]


class HiddenForward(ABC):
    """Log-probs by the tiled head. Raises NotImplementedError if the LM head is not a plain nn.Linear."""

    def __init__(self, model: PreTrainedModel) -> None:
        LMHead.of(model)  # raises
        self._model = model
        self._vision = vision_of(model)

    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        return self._head().logps(*self._inputs(groups, temperatures))

    def with_entropy(
        self, groups: Sequence[TokenGroup], temperatures: Sequence[float], *, entropy_grad: bool = True
    ) -> tuple[Tensor, Tensor]:
        return self._head().logps_and_entropy(*self._inputs(groups, temperatures), entropy_grad=entropy_grad)

    def with_likeliest(
        self, groups: Sequence[TokenGroup], temperatures: Sequence[float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._head().logps_and_likeliest(*self._inputs(groups, temperatures))

    def _head(self) -> LMHead:
        """Looked up in each forward: a sharded model has the head's whole weight only while the forward runs."""
        return LMHead.of(self._model)

    @abstractmethod
    def _hidden(self, groups: Sequence[TokenGroup]) -> Tensor:
        """(sum of C, h) hidden states that predict the completion tokens, in order."""

    def _inputs(
        self, groups: Sequence[TokenGroup], temperatures: Sequence[float]
    ) -> tuple[Tensor, Tensor, Tensor, KeptTokens | None]:
        """(sum of C, h) hidden states, (sum of C,) completion tokens and temperatures, and the sampling masks, where
        the head is: layers of a model that is spread over devices may be elsewhere."""
        tokens = np.concatenate([group.completion_ids for group in groups])
        head = self._head()
        # A scale of the logits does what a temperature does.
        per_token = np.repeat(temperatures, [len(group.completion_ids) for group in groups]) / head.scale
        device = head.weight.device
        return (
            self._hidden(groups).to(device),
            torch.tensor(tokens, device=device),
            torch.tensor(per_token, dtype=torch.float32, device=device),
            kept_tokens(groups, device),
        )
