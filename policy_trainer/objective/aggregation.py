"""From tokens to one number: the weight of each token, under which a plain sum is the loss of a whole update.

A weight depends on the token's completion and on totals of the update, never on what else is in its micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from policy_trainer.objective.ratios import row_sums


@dataclass(frozen=True)
class Totals:
    """Of a whole update, over all of its micro-batches. completions: those that train. tokens: those that train.
    max_completion_length: the length that completions are cut off at, L_max of Dr. GRPO."""

    completions: int
    tokens: int
    max_completion_length: int


def token_weights(mean: str, rows: Tensor, mask: Tensor, trains: Tensor, totals: Totals) -> Tensor:
    """Weights, float64 (C,), of a name of AGGREGATIONS; 0 where nothing trains.

    rows: int64 (C,), the completion of each token. mask: bool (C,). trains: bool (G,), false for completions that take
    no part.
    """
    trained = mask & trains[rows]
    return torch.where(trained, AGGREGATIONS[mean](rows, trained, totals), 0.0)


def _sequence_mean(rows: Tensor, trained: Tensor, totals: Totals) -> Tensor:
    """The mean over completions of means over their tokens (GRPO). A completion without trained tokens adds 0."""
    return (1 / (row_sums(trained, rows).clamp(min=1) * max(totals.completions, 1)))[rows]


def _token_mean(rows: Tensor, trained: Tensor, totals: Totals) -> Tensor:
    """The mean over tokens (DAPO)."""
    return trained.double() / max(totals.tokens, 1)


def _constant(rows: Tensor, trained: Tensor, totals: Totals) -> Tensor:
    """The sum over a number that no length changes (Dr. GRPO, arXiv 2503.20783)."""
    return trained.double() / (max(totals.completions, 1) * totals.max_completion_length)


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, Totals], Tensor]] = {
    "sequence_mean": _sequence_mean,
    "token_mean": _token_mean,
    "constant": _constant,
}
