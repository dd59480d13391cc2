"""Loss aggregation: the weights of tokens, whose weighted sum is the loss of a whole update.

A weight depends on the token's completion and on totals of the update, never on the rest of its micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from policy_trainer.algorithms.surrogates.sums import masked, sequence_sums
from shared.devices import widest_float


@dataclass(frozen=True)
class Totals:
    """Counts over all micro-batches of an update. completions, tokens: how many of them train. max_completion_length:
    the length at which completions are cut off, Dr. GRPO's L_max. explored, observed: numbers of tokens in the entropy
    bonus and in ECHO's cross-entropy."""

    completions: int
    tokens: int
    max_completion_length: int
    explored: int = 0
    observed: int = 0


def update_mean(values: Float[Tensor, " C"], mask: Bool[Tensor, " C"], tokens: int) -> Float[Tensor, ""]:
    """Returns a micro-batch's part of a mean over tokens of an update, with a gradient. mask: tokens that the mean
    includes. tokens: their number in the whole update."""
    return masked(values, mask).sum() / max(tokens, 1)


def token_weights(
    aggregation: str, sequence_ids: Int64[Tensor, " C"], mask: Bool[Tensor, " C"], totals: Totals
) -> Float[Tensor, " C"]:
    """Returns the weight of each token, in the dtype of `widest_float`; 0 where masked.

    aggregation: a key of AGGREGATIONS. sequence_ids: the completion of each token. mask: tokens that train.
    """
    return torch.where(mask, AGGREGATIONS[aggregation](sequence_ids, mask, totals), 0.0)


def _sequence_mean(sequence_ids: Int64[Tensor, " C"], mask: Bool[Tensor, " C"], totals: Totals) -> Float[Tensor, " C"]:
    """The mean over completions of means over their tokens (GRPO). A completion without tokens that train adds 0."""
    return (1 / (sequence_sums(mask, sequence_ids).clamp(min=1) * max(totals.completions, 1)))[sequence_ids]


def _token_mean(sequence_ids: Int64[Tensor, " C"], mask: Bool[Tensor, " C"], totals: Totals) -> Float[Tensor, " C"]:
    """The mean over tokens (DAPO)."""
    return mask.to(widest_float(mask.device)) / max(totals.tokens, 1)


def _constant(sequence_ids: Int64[Tensor, " C"], mask: Bool[Tensor, " C"], totals: Totals) -> Float[Tensor, " C"]:
    """The sum divided by a constant that does not depend on lengths (Dr. GRPO, arXiv 2503.20783)."""
    return mask.to(widest_float(mask.device)) / (max(totals.completions, 1) * totals.max_completion_length)


def _luspo(sequence_ids: Int64[Tensor, " C"], mask: Bool[Tensor, " C"], totals: Totals) -> Float[Tensor, " C"]:
    """The mean over completions of sums over their tokens (LUSPO, arXiv 2602.05261): with one ratio per completion, the
    weight of its tokens does not depend on its length."""
    return mask.to(widest_float(mask.device)) / max(totals.completions, 1)


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, Totals], Tensor]] = {
    "sequence_mean": _sequence_mean,
    "token_mean": _token_mean,
    "constant": _constant,
    "luspo": _luspo,
}
