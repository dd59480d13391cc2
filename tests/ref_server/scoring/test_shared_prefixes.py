"""Rows that begin alike, scored as groups, have the values that they have one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ref_server.scoring.shared_prefixes import Row, SharedPrefixes
from shared.batch import TokenGroup


def value(ids: tuple[int, ...]) -> float:
    """Of the last token: it depends on all before it, as a log-prob does."""
    return hash(ids) % 1009 / 1009


def values(group: TokenGroup) -> np.ndarray:
    prompt = tuple(group.prompt_ids.tolist())
    rows = [(*prompt, *ids.tolist()) for ids in group.completions()]
    return np.array([value(row[: end + 1]) for row in rows for end in range(len(prompt), len(row))])


@st.composite
def some_rows(draw: st.DrawFn) -> list[Row]:
    ids = draw(st.lists(st.lists(st.sampled_from([1, 2]), min_size=2, max_size=9), min_size=1, max_size=8))
    return [Row(row, draw(st.integers(1, len(row) - 1))) for row in ids]


@given(some_rows())
def test_values_are_those_of_rows_by_themselves(rows: list[Row]) -> None:
    shared = SharedPrefixes(rows)
    rows_values = shared.by_row([values(group) for group in shared.groups])
    for row, of_row in zip(rows, rows_values, strict=True):
        assert len(of_row) == len(row.ids) - 1
        wanted = [value(tuple(row.ids[: index + 1])) for index in range(row.first, len(row.ids))]
        assert of_row[row.first - 1 :].tolist() == wanted
    assert tokens(shared) <= sum(len(row.ids) for row in rows)


def tokens(shared: SharedPrefixes) -> int:
    return sum(group.tokens for group in shared.groups)


def test_a_prompt_with_its_completions_is_a_group() -> None:
    prompt = list(range(300))
    rows = [Row([*prompt, 1000 + number, *range(99)], first=300) for number in range(8)]
    (group,) = SharedPrefixes(rows).groups
    assert (len(group.prompt_ids), group.size, group.tokens) == (300, 8, 300 + 8 * 100)


def test_a_prompt_whose_log_probs_are_wanted_is_computed_twice() -> None:
    prompt = list(range(300))
    three = [Row([*prompt, 1000 + number]) for number in range(3)]
    assert [group.tokens for group in SharedPrefixes(three).groups] == [303, 300]
    assert tokens(SharedPrefixes(three[:2])) == 602, "nothing would be saved"


def test_prompts_of_several_problems() -> None:
    """All begin with the same system prompt, which is shorter than what the rows of each problem share."""
    system, problems = [1] * 20, [[2] * 50, [3] * 60]
    rows = [Row([*system, *problem, 9, number], first=21 + len(problem)) for problem in problems for number in range(4)]
    groups = SharedPrefixes(rows).groups
    assert sorted(len(group.prompt_ids) for group in groups) == [71, 81]


def test_many_rows_one_inside_of_the_other() -> None:
    rows = [Row([1] * length) for length in range(2, 1000)]
    shared = SharedPrefixes(rows)
    assert tokens(shared) < sum(len(row.ids) for row in rows) / 2
    assert [len(of_row) for of_row in shared.by_row([values(group) for group in shared.groups])] == [
        len(row.ids) - 1 for row in rows
    ]
