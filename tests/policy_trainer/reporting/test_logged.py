"""What rewards logged travels with a group's batch, within its bounds, and becomes metrics of a step."""

import json
from dataclasses import replace
from typing import Any

import pytest

from policy_trainer.reporting.logged import extras_of, logged_metrics, report
from policy_trainer.rewards.call_log import KEY, Logged
from shared.batch import MAX_SAMPLE_BYTES, Batch


@pytest.fixture
def batch(make_scored: Any) -> Batch:
    return make_scored([1, 2], [[3], [4], [5]], [0.0, 1.0, 2.0])


def with_sample(batch: Batch, fields: Any) -> Batch:
    return replace(batch, sample=json.dumps(fields))


def test_metrics_are_means_over_the_completions_of_a_step(batch: Batch) -> None:
    rows = [Logged({"a": 1.0, "b": 4.0}), Logged({"a": 2.0}), Logged({"a": 6.0})]
    first = with_sample(batch, report(rows, {}))
    second = with_sample(batch, report([Logged({"a": 9.0}), Logged(), Logged()], {}))
    assert logged_metrics([first, batch, second]) == {"logged/a": 18 / 4, "logged/b": 4.0}
    assert logged_metrics([batch]) == {}


def test_extras_are_of_each_completion(batch: Batch) -> None:
    rows = [Logged(extras={"answer": "x" * 1000, "right": True}), Logged(extras={"answer": None}), Logged()]
    first, second, third = extras_of(with_sample(batch, report(rows, {})))
    assert first == {"answer": "x" * 300, "right": True}
    assert second == third == {"answer": None, "right": None}
    assert extras_of(batch) == [{}, {}, {}]


def test_columns_that_find_no_room_are_left_out(batch: Batch) -> None:
    rows = [Logged({"m": 1.0}, {f"column {i}": "é" * 300 for i in range(20)})] * 3
    others = {"rollouts": "x" * 9000}
    sent = report(rows, others)
    size = len(json.dumps({**others, **sent}, ensure_ascii=False).encode())
    assert size < MAX_SAMPLE_BYTES and 2 < len(sent[KEY]["extras"]) < 20 and sent[KEY]["metrics"] == {"m": (1.0, 3)}
    assert report([Logged()] * 3, {}) == {}


@pytest.mark.parametrize(
    "invented",
    [
        3,
        {"metrics": {}, "extras": {"a": [1]}},
        {"metrics": {"a": ["x", 1]}, "extras": {}},
        {"metrics": {"a": [1.0, 0]}, "extras": {}},
        {"metrics": {"a": [1.0, 1]}},
    ],
)
def test_what_other_clients_put_there_is_no_report(invented: Any, batch: Batch) -> None:
    given = with_sample(batch, {KEY: invented})
    assert logged_metrics([given]) == {} and extras_of(given) == [{}, {}, {}]
