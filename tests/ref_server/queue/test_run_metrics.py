"""The metrics of runs in either store: what is kept, what replaces what, and what goes when there is too much."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ref_server.queue import run_metrics
from ref_server.queue.queue import Queue
from shared.api import Kind, MetricsRecord
from tests.ref_server.queue.backends import RETENTION, Backend, Clock, make_limits


@pytest.fixture
def queue(backend: Backend, clock: Clock) -> Iterator[Queue]:
    with closing(backend.open(clock, make_limits())) as queue:
        yield queue


def record(step: int, kind: str = "step", **fields: Any) -> MetricsRecord:
    return MetricsRecord.model_validate({"kind": kind, "step": step, **fields})


def steps(queue: Queue, run: str = "run", lineage: str = "", kind: Kind = Kind.STEP) -> list[int]:
    """All steps of a curve, page by page."""
    collected: list[int] = []
    while page := queue.metrics_page(run, lineage, kind, collected[-1] if collected else -1, 1000):
        collected += [point.step for point in page]
    return collected


def summary(queue: Queue) -> list[tuple[Any, ...]]:
    return [(curve.run, curve.lineage, curve.kind, curve.records, curve.step) for curve in queue.curves()]


def test_a_record_comes_back_as_it_was(queue: Queue, clock: Clock) -> None:
    sent = record(3, reward=0.5, kl=None, batch_ids=["a", "\u00e9\0"], rewards={"tags": 1}, not_finite=False)
    queue.keep_metrics("r\u00fcn", "one", [sent])
    (point,) = queue.metrics_page("r\u00fcn", "one", Kind.STEP, -1, 10)
    assert (point.step, point.at) == (3, pytest.approx(clock.wall()))
    assert MetricsRecord.model_validate_json(point.record) == sent
    assert queue.metrics_of_step("r\u00fcn", "one", 3) == [sent.text]
    assert queue.metrics_of_step("r\u00fcn", "one", 3, sent.kind) == [sent.text]
    assert queue.metrics_of_step("r\u00fcn", "one", 3, Kind.SAMPLES) == []
    assert (
        queue.metrics_of_step("r\u00fcn", "two", 3) == queue.metrics_page("r\u00fcn", "one", Kind.HEALTH, -1, 10) == []
    )


def test_a_record_that_is_sent_again_keeps_its_time(queue: Queue, clock: Clock) -> None:
    queue.keep_metrics("run", "", [record(1, reward=1), record(2, reward=1)])
    clock.advance(9)
    queue.keep_metrics("run", "", [record(1, reward=1), record(2, reward=5)])
    first, second = (point.at for point in queue.metrics_page("run", "", Kind.STEP, -1, 10))
    assert second - first == pytest.approx(9)
    (curve,) = queue.curves()
    assert curve.updated_at - curve.first_at == pytest.approx(9)


def test_pages_go_on_where_they_ended(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.keep_metrics("run", "", [record(step, "health", name=name) for step in (1, 2, 3) for name in "ab"])
    assert [point.step for point in queue.metrics_page("run", "", Kind.HEALTH, -1, 2)] == [
        1,
        1,
        2,
        2,
    ]  # a step is whole
    assert [point.step for point in queue.metrics_page("run", "", Kind.HEALTH, 2, 2)] == [3, 3]
    monkeypatch.setattr("ref_server.queue.run_metrics.PAGE_BYTES", 1)
    assert [point.step for point in queue.metrics_page("run", "", Kind.HEALTH, -1, 9)] == [1, 1]


def test_a_long_curve_keeps_its_shape(queue: Queue) -> None:
    for begin in range(0, 10_240, 256):
        queue.keep_metrics("run", "", [record(step) for step in range(begin, begin + 256)])
    left = steps(queue)
    (curve,) = queue.curves()
    assert curve.records == len(left) <= run_metrics.MOST_RECORDS
    assert curve.bytes == sum(len(point.record) for point in queue.metrics_page("run", "", Kind.STEP, -1, 9999))
    assert left[-run_metrics.WHOLE :] == list(range(10_240 - run_metrics.WHOLE, 10_240))
    assert left[0] == 0
    assert max(later - step for step, later in pairwise(left)) == 4
    assert len(left) > run_metrics.MOST_RECORDS / 2


def test_large_records_thin_a_curve_out_earlier(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_metrics, "MOST_BYTES", 4000)
    monkeypatch.setattr(run_metrics, "WHOLE", 2)
    for step in range(40):
        queue.keep_metrics("run", "", [record(step, text="x" * 200)])
    (curve,) = queue.curves()
    assert 1000 < curve.bytes <= 4000
    assert steps(queue)[-2:] == [38, 39]


def test_many_records_of_one_step_are_bounded_too(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_metrics, "MOST_RECORDS", 20)
    monkeypatch.setattr(run_metrics, "WHOLE", 2)
    queue.keep_metrics("run", "", [record(7, "health", name=f"{name:03}") for name in range(200)])
    (curve,) = queue.curves()
    left = queue.metrics_of_step("run", "", 7)
    assert curve.records == len(left) <= 20
    assert left[-1] == record(7, "health", name="199").text


def test_the_lineage_that_was_silent_longest_goes(queue: Queue, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_metrics, "MOST_LINEAGES", 3)
    monkeypatch.setattr(run_metrics, "MOST_LINEAGES_OF_RUN", 2)
    for run, lineage in (("a", "1"), ("a", "2"), ("b", "1"), ("a", "1"), ("c", "1")):
        clock.advance(1)
        queue.keep_metrics(run, lineage, [record(1)])
    assert [curve.key[:2] for curve in queue.curves()] == [("c", "1"), ("a", "1"), ("b", "1")]
    assert queue.metrics_of_step("a", "2", 1) == []
    for lineage in "23":  # of one run
        clock.advance(1)
        queue.keep_metrics("a", lineage, [record(1)])
    assert [curve.key[:2] for curve in queue.curves("a")] == [("a", "3"), ("a", "2")]


def test_bytes_of_all_runs_are_bounded(queue: Queue, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_metrics, "MOST_BYTES_IN_ALL", 3000)
    for run in "abcd":
        clock.advance(1)
        queue.keep_metrics(run, "", [record(1, text="x" * 1000)])
    assert [curve.run for curve in queue.curves()] == ["d", "c"]


def test_what_was_silent_for_long_is_forgotten(queue: Queue, clock: Clock) -> None:
    queue.keep_metrics("old", "", [record(1), record(1, "evaluation")])
    clock.advance(RETENTION / 2)
    queue.keep_metrics("alive", "", [record(1, "evaluation")])
    clock.advance(RETENTION / 2 + 1)
    queue.keep_metrics("alive", "", [record(1)])  # its other curve has not grown for long
    while queue.tidy():
        pass
    assert {curve.run for curve in queue.curves()} == {"alive"}
    assert len(queue.curves()) == 2
    assert queue.metrics_of_step("old", "", 1) == []


Records = dict[tuple[str, int, str], str]
_records = st.builds(
    lambda kind, step, name, value: record(step, kind, **({"name": name} if name else {}), value=value),
    st.sampled_from([*Kind]), st.integers(0, 5), st.sampled_from(["", "", "a"]), st.integers(0, 2),
)  # fmt: skip
_posts = st.tuples(
    st.sampled_from(["x", "y"]), st.none() | st.integers(-1, 5), st.lists(_records, min_size=1, max_size=5)
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_posts, max_size=8))
def test_curves_are_what_a_dictionary_would_hold(queue: Queue, posts: Sequence[Any]) -> None:
    modelled: dict[str, Records] = {"x": {}, "y": {}}
    for lineage in modelled:
        queue.keep_metrics("run", lineage, [record(0)], after=-1)
        modelled[lineage] = {("step", 0, ""): record(0).text}
    for lineage, after, records in posts:
        kept = {key: text for key, text in modelled[lineage].items() if after is None or key[1] <= after}
        modelled[lineage] = kept | {(each.kind, each.step, each.name or ""): each.text for each in records}
        queue.keep_metrics("run", lineage, records, after)
    for lineage, expected in modelled.items():
        for step in range(6):
            assert queue.metrics_of_step("run", lineage, step) == [
                expected[key] for key in sorted(expected) if key[1] == step
            ]
        for curve in queue.curves("run"):
            kept = {key: text for key, text in expected.items() if key[0] == curve.kind}
            if curve.lineage == lineage:
                assert curve.records == len(kept) == len(queue.metrics_page("run", lineage, Kind(curve.kind), -1, 99))
                assert curve.bytes == sum(map(len, kept.values()))
                assert curve.step == max(key[1] for key in kept)
