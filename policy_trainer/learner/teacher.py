"""The teacher's log-probs: of the server's second model, or of its only one where the KL penalty does not use that."""

from policy_trainer.config import LossConfig, ReferenceSource
from shared.batch import Array, RolloutBatch, ScoredBatch


def teacher_logps(batch: RolloutBatch | ScoredBatch, loss: LossConfig, reference: ReferenceSource) -> Array | None:
    """float32 (C,); None where the batch has none, or the loss uses none. reference: of the KL penalty."""
    if not loss.distillation or not isinstance(batch, ScoredBatch):
        return None
    penalised = loss.beta > 0 and reference == "server"
    return batch.ref_logps if batch.teacher_logps is None and not penalised else batch.teacher_logps
