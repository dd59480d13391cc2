"""Warnings and errors for conflicting arguments, as in TRL, and a warning for completions without a reward."""

import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from policy_trainer.trl.config import GRPOConfig
from shared.errors import UserError

if TYPE_CHECKING:
    from policy_trainer.trainer.observer import Groups, Metrics

log = logging.getLogger(__name__)  # from the standard library, as in TRL, so that scripts can filter it


def cautions(args: GRPOConfig) -> Iterator[str]:
    level, loss = args.importance_sampling_level, args.loss_type
    if level == "sequence" and loss in ("bnpo", "dr_grpo", "dapo", "cispo"):
        yield (
            f"loss_type: with importance_sampling_level='sequence', {loss} sums the loss over tokens, which weights "
            "each sequence by its completion length: use loss_type='grpo' to weight all alike, as in GSPO"
        )
    if loss == "luspo" and level != "sequence":
        yield "importance_sampling_level: luspo is meant for 'sequence', as in its paper"
    if loss == "vespo" and level != "token":
        yield "importance_sampling_level: vespo computes weights of sequences itself: leave it at 'token'"


def refuse_contradictions(args: GRPOConfig, *, adapts: bool, in_4bit: bool, held_out: bool) -> None:
    """Raises UserError for arguments that contradict each other, by TRL's names. adapts: whether adapters are trained.
    in_4bit: whether the weights are quantised. held_out: whether there is an eval_dataset."""
    if in_4bit and not adapts:
        raise UserError("quantization_config: 4-bit weights cannot be trained", "pass peft_config too")
    if args.eval_strategy != "no" and not held_out:
        raise UserError("eval_dataset: required by eval_strategy", "pass one, or set eval_strategy='no'")
    if not args.sync_ref_model:
        return
    if args.beta == 0:
        raise UserError(
            "sync_ref_model: You passed `sync_ref_model=True` while `beta=0.0`, which means the reference model is "
            "not used",
            "set beta above 0, or leave sync_ref_model out",
        )
    if adapts:
        raise UserError("sync_ref_model: with adapters the reference is the model without adapters", "leave it out")


def warn_of_unjudged(record: "Metrics", groups: "Groups") -> None:
    """Warns if all reward functions returned None for any completion of a step, and shows the first of these."""
    if not record.get("unrewarded"):
        return
    for group in groups():
        for each in group.completions:
            if all(math.isnan(score) for score in each.parts.values()):
                shown: dict[str, Any] = {"prompt": group.prompt, "completion": each.text, "answer": group.answer}
                log.warning(
                    "All reward functions returned None for the following kwargs:\n%s\nThe completion is not "
                    "trained on: at least one reward function must return a number.",
                    shown,
                )
                return
