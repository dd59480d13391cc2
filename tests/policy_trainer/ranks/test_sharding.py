"""Which rank computes which groups."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.ranks.sharding import Costs, parts_of_rank, share
from shared.batch import TokenGroup

COSTS = Costs(token=100.0, pair=1.0)


def group(prompt: int, *lengths: int) -> TokenGroup:
    ids = np.zeros(prompt + sum(lengths), np.int64)
    return TokenGroup(ids[:prompt], ids[prompt:], np.array(lengths, np.int64))


lengths = st.lists(st.integers(1, 30), min_size=1)
one = st.builds(lambda prompt, lengths: group(prompt, *lengths), st.integers(1, 40), lengths)
groups = st.lists(one, min_size=1, max_size=12)


def test_a_forward_costs_its_tokens_and_what_they_attend_to() -> None:
    """Prompt of 4, completions of 2 and 6: 12 tokens; 4 * 4 / 2, 2 * (4 + 1) and 6 * (4 + 3) pairs."""
    assert COSTS.forward(group(4, 2, 6)) == 12 * 100 + 8 + 10 + 42


def test_costs_are_those_of_the_model(make_tiny) -> None:
    """A tied embedding is the head, and multiplied; an untied one is looked up alone."""
    tied, untied = make_tiny(), make_tiny(tied=False)
    assert Costs.of(tied).token == Costs.of(untied).token == 2 * sum(own.numel() for own in tied.parameters())
    assert Costs.of(tied).pair == 4 * 2 * 16  # layers, width of all heads


def test_the_costliest_group_goes_first_to_whoever_has_least() -> None:
    found = share([group(1, 10), group(1, 50), group(1, 30), group(1, 40)], 2, COSTS)
    assert found == [[0, 1], [2, 3]]


@given(groups, st.integers(1, 5))
def test_every_group_has_one_rank_and_no_rank_has_much_more_than_another(groups: list[TokenGroup], ranks: int) -> None:
    shares = share(groups, ranks, COSTS)
    assert sorted(place for own in shares for place in own) == list(range(len(groups)))
    costs = [COSTS.forward(one) for one in groups]
    loads = sorted(sum(costs[place] for place in own) for own in shares)
    assert loads[-1] - loads[0] <= max(costs)


@given(groups, st.integers(1, 5), st.integers(1, 200))
def test_ranks_do_as_many_forwards_and_each_group_counts_once(groups: list[TokenGroup], ranks: int, limit: int) -> None:
    parts = [parts_of_rank(groups, rank, ranks, limit, COSTS) for rank in range(ranks)]
    assert all(len(own) == len(other) for own, other in pairwise(parts))
    counted = [place for own in parts for places, counts in own if counts for place in places]
    assert sorted(counted) == list(range(len(groups)))
    for own in parts:
        for places, counts in own:
            tokens = sum(groups[place].tokens for place in places)
            assert tokens <= limit or len(places) == 1
            assert counts or tokens == min(one.tokens for one in groups)


@pytest.mark.parametrize("ranks", [1, 2])
def test_of_one_group_the_other_ranks_compute_a_copy(ranks: int) -> None:
    last = parts_of_rank([group(3, 2)], ranks - 1, ranks, 10, COSTS)
    assert [(list(places), counts) for places, counts in last] == [([0], ranks == 1)]
