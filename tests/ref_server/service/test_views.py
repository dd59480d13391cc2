"""Columns of the numbers that runs have reported."""

from ref_server.queue.run_metrics import Point
from ref_server.service.views import columns


def test_a_damaged_record_hides_no_other() -> None:
    points = [Point(step, 0.0, record) for step, record in enumerate(['{"a": 1}', '{"a', "[]", '{"a": 2}'])]
    assert columns(points, []) == {"a": [1, None, None, 2]}
