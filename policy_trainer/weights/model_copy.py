"""A copy of a model's weights in main memory, which is saved while the model trains on."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shared.models import save_model


@dataclass(frozen=True, eq=False)
class ModelCopy:
    """state: as the model's state_dict was. The model itself is asked for its configuration alone."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    state: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Self:
        copies: dict[int, Tensor] = {}  # tied weights have several names, and are saved once
        state = {}
        for name, tensor in model.state_dict().items():
            if tensor.data_ptr() not in copies:
                copies[tensor.data_ptr()] = tensor.detach().to("cpu", copy=True)
            state[name] = copies[tensor.data_ptr()]
        return cls(model, tokenizer, state)

    def save(self, directory: Path) -> None:
        """Writes a Hugging Face model directory."""
        save_model(self.model, self.tokenizer, directory, self.state)
