"""Token weights by hand; and a step's weights are the same however it is cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from policy_trainer.algorithms.objective.aggregation import AGGREGATIONS, Totals, token_weights

# Lengths 3, 2, 1, 2; the second completion does not train, the third has no trained token.
SEQUENCE_IDS = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3])
MASK = torch.tensor([1, 0, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
SEQUENCE_MASK = torch.tensor([True, False, True, True])


@pytest.mark.parametrize(
    ("aggregation", "weight"),
    [
        # A completion that trains counts, also without a trained token.
        ("sequence_mean", 1 / 6),
        ("token_mean", 1 / 4),
        ("constant", 1 / (3 * 5)),
        ("luspo", 1 / 3),
    ],
)
def test_ragged_by_hand(aggregation: str, weight: float) -> None:
    weights = token_weights(
        aggregation,
        SEQUENCE_IDS,
        MASK & SEQUENCE_MASK[SEQUENCE_IDS],
        Totals(completions=3, tokens=4, max_completion_length=5),
    )
    assert weights.dtype == torch.float64
    assert weights.tolist() == pytest.approx([weight, 0, weight, 0, 0, 0, weight, weight], rel=1e-15, abs=0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_of_nothing_that_trains(aggregation: str) -> None:
    nothing = Totals(completions=0, tokens=0, max_completion_length=5)
    assert token_weights(aggregation, SEQUENCE_IDS, torch.zeros_like(MASK), nothing).tolist() == [0.0] * 8


def lengths_and_mask(seed: int, count: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 300, (count,), generator=generator)
    mask = torch.rand(int(lengths.sum()), generator=generator) > 0.4
    mask[lengths.cumsum(0) - 1] = True  # so that each completion trains something
    return lengths, mask, torch.rand(count, generator=generator) > 0.2


def weights_of(aggregation: str, lengths: Tensor, mask: Tensor, sequence_mask: Tensor, totals: Totals) -> Tensor:
    sequence_ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return token_weights(aggregation, sequence_ids, mask & sequence_mask[sequence_ids], totals)


@given(st.sampled_from(list(AGGREGATIONS)), st.integers(0, 1000), st.integers(1, 39))
def test_a_part_weighs_what_it_weighs_in_the_whole(aggregation: str, seed: int, cut: int) -> None:
    lengths, mask, sequence_mask = lengths_and_mask(seed)
    totals = Totals(completions=37, tokens=1234, max_completion_length=300)
    tokens = int(lengths[:cut].sum())
    parts = [
        weights_of(aggregation, lengths[:cut], mask[:tokens], sequence_mask[:cut], totals),
        weights_of(aggregation, lengths[cut:], mask[tokens:], sequence_mask[cut:], totals),
    ]
    assert torch.equal(torch.cat(parts), weights_of(aggregation, lengths, mask, sequence_mask, totals))
