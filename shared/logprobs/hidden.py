"""What forwards through the tiled head have in common, however they compute hidden states."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.batch import TokenGroup
from shared.logprobs.head import LMHead


class HiddenForward(ABC):
    """Raises NotImplementedError for a head that is more than a matrix."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._head = LMHead.of(model)
        self._model = model

    def __call__(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
        return self._head.logps(self._hidden(groups), *self._wanted(groups, temperatures))

    def with_entropy(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> tuple[Tensor, Tensor]:
        return self._head.logps_and_entropy(self._hidden(groups), *self._wanted(groups, temperatures))

    @abstractmethod
    def _hidden(self, groups: Sequence[TokenGroup]) -> Tensor:
        """(sum of C, h) hidden states that predict the completion tokens, in order."""

    def _wanted(self, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> tuple[Tensor, Tensor]:
        """(sum of C,) the completion tokens, and the temperature of each."""
        tokens = np.concatenate([group.completion_ids for group in groups])
        per_token = np.repeat(temperatures, [len(group.completion_ids) for group in groups])
        device = self._model.device
        return torch.tensor(tokens, device=device), torch.tensor(per_token, dtype=torch.float32, device=device)
