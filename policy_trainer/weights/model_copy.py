"""A copy of a model's weights in main memory, which is saved while the model trains on."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.learner.adapters import save_policy


@dataclass(frozen=True, eq=False)
class ModelCopy:
    """state: as the learner copied it. The model itself is asked for its configuration alone."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    state: Mapping[str, Tensor]

    def save(self, directory: Path) -> None:
        """Writes a Hugging Face model directory, or one of adapters."""
        save_policy(self.model, self.tokenizer, directory, self.state)
