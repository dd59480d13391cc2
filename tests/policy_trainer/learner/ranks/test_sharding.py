"""Which rank computes which groups."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_trainer.learner.ranks.sharding import forward_cost, parts_of_rank, share
from shared.batch import TokenGroup


def group(prompt: int, *lengths: int) -> TokenGroup:
    ids = np.zeros(prompt + sum(lengths), np.int64)
    return TokenGroup(ids[:prompt], ids[prompt:], np.array(lengths, np.int64))


lengths = st.lists(st.integers(1, 30), min_size=1)
a_group = st.builds(lambda prompt, lengths: group(prompt, *lengths), st.integers(1, 40), lengths)
groups = st.lists(a_group, min_size=1, max_size=12)


def cost(group: TokenGroup) -> float:
    return 100 * group.tokens + len(group.prompt_ids)


@pytest.mark.parametrize("tied", [True, False])
def test_a_forward_costs_its_tokens_and_what_they_attend_to(tied: bool, make_tiny) -> None:
    """Prompt of 4, completions of 2 and 6: 12 tokens; 4 * 4 / 2, 2 * (4 + 1) and 6 * (4 + 3) pairs.

    A tied embedding is the head, and multiplied; an untied one is only looked up.
    """
    of_token = 2 * sum(weight.numel() for weight in make_tiny().parameters())
    of_pair = 4 * 2 * 16  # layers, width of all heads
    assert forward_cost(make_tiny(tied=tied))(group(4, 2, 6)) == 12 * of_token + (8 + 10 + 42) * of_pair


def test_the_costliest_group_goes_first_to_whoever_has_least() -> None:
    shares = share([group(1, 10), group(1, 50), group(1, 30), group(1, 40)], 2, cost)
    assert shares == [[0, 1], [2, 3]]


@given(groups, st.integers(1, 5))
def test_every_group_has_one_rank_and_no_rank_has_much_more_than_another(groups: list[TokenGroup], ranks: int) -> None:
    shares = share(groups, ranks, cost)
    assert sorted(place for places in shares for place in places) == list(range(len(groups)))
    costs = [cost(each) for each in groups]
    loads = sorted(sum(costs[place] for place in places) for places in shares)
    assert loads[-1] - loads[0] <= max(costs)


@given(groups, st.integers(1, 5), st.integers(1, 200))
def test_ranks_do_as_many_forwards_and_each_group_counts_once(groups: list[TokenGroup], ranks: int, limit: int) -> None:
    parts = [parts_of_rank(groups, rank, ranks, limit, cost) for rank in range(ranks)]
    assert all(len(forwards) == len(other) for forwards, other in pairwise(parts))
    counted = [place for forwards in parts for places, counts in forwards if counts for place in places]
    assert sorted(counted) == list(range(len(groups)))
    for forwards in parts:
        for places, counts in forwards:
            tokens = sum(groups[place].tokens for place in places)
            assert tokens <= limit or len(places) == 1
            assert counts or tokens == min(each.tokens for each in groups)


@pytest.mark.parametrize("ranks", [1, 2])
def test_of_one_group_the_other_ranks_compute_a_copy(ranks: int) -> None:
    last = parts_of_rank([group(3, 2)], ranks - 1, ranks, 10, cost)
    assert [(list(places), counts) for places, counts in last] == [([0], ranks == 1)]
