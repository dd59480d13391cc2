"""What a run can train on. A batch that it cannot is given back with the reason: no batch may end a run."""

from dataclasses import dataclass, field
from typing import Self

from transformers import PreTrainedModel

from policy_trainer.config import LossConfig, ReferenceSource, TrainConfig
from policy_trainer.learner.groups import Batch, PartWeights, missing_input, rollout_of
from shared.batch import BatchError
from shared.logprobs import embedding_rows
from shared.models import context_length


@dataclass(frozen=True)
class Intake:
    """vocabulary: rows of the policy's embedding. context: most tokens of a row; None where the model has no bound.
    reference: the source of its log-probs. weights: of the rewards, by name.

    A server with a model has checked both. A server without one knows neither.
    """

    loss: LossConfig
    vocabulary: int
    context: int | None
    reference: ReferenceSource = "server"
    weights: PartWeights = field(default_factory=dict)

    @classmethod
    def of(cls, model: PreTrainedModel, config: TrainConfig, weights: PartWeights) -> Self:
        return cls(config.loss, embedding_rows(model), context_length(model), config.reference.source, weights)

    def refusal(self, batch: Batch) -> str | None:
        """Why the batch cannot be trained on; None if it can."""
        group = rollout_of(batch).group
        try:
            group.check_ids(self.vocabulary, "the policy's vocabulary")
        except BatchError as error:
            return str(error)
        if self.context is not None and group.longest_row > self.context:
            return f"it has a row of {group.longest_row} tokens; the policy's context is {self.context}"
        return missing_input(batch, self.loss, self.reference, self.weights)
