"""Whether the rewards of a group differ."""

import math

import numpy as np
import pytest

from policy_trainer.objective.group import differ, has_variance

NAN = math.nan


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 1.0], True),
        ([1.0, 1.0], False),
        ([1.0], False),
        ([], False),
        ([NAN], False),
        ([NAN, 1.0], False),
        ([NAN, 1.0, 1.0], False),
        ([NAN, 1.0, NAN, 0.0], True),
        ([0.1, 0.1, 0.1], False),
        ([1.0, 1.0000001], True),
    ],
)
def test_variance(rewards: list[float], expected: bool) -> None:
    assert has_variance(np.array(rewards)) is expected


def test_each_row_has_its_own() -> None:
    rows = np.array([[0.0, 1.0], [1.0, 1.0], [NAN, 1.0], [NAN, NAN]])
    assert differ(rows).tolist() == [[True], [False], [False], [False]]
