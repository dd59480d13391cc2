"""A short run of the fuzzer: it reaches every stage and finds faults."""

from collections.abc import Callable, Sequence

import pytest

from tests.fuzz import bundle, legacy, native, workers
from tests.fuzz.workers import Outcome, fuzz

# Fewer for the legacy decoder, which is slower.
INPUTS = {"native": 8_000, "bundle": 8_000, "legacy": 2_000}
STAGES = {
    "native": {*native.STAGES.values(), "accepted"},
    "bundle": {*bundle.STAGES.values(), "accepted"},
    "legacy": {*legacy.STAGES.values(), "accepted", "string mode"},
}


@pytest.mark.parametrize("target", INPUTS)
def test_every_input_is_accepted_or_refused(target: str) -> None:
    total = Outcome()
    for outcome in fuzz(target, INPUTS[target], seed=1, processes=1):
        total.add(outcome)
    assert not total.failures
    assert total.inputs == INPUTS[target]
    assert set(total.stages) == STAGES[target]
    assert total.stages["accepted"] > total.inputs / 10


@pytest.mark.parametrize(
    ("bodies", "judge"),
    [
        (native.SEEDS, native.judge),
        (bundle.SEEDS, bundle.judge),
        ([legacy.join_frame(parts) for parts in legacy.SEEDS], legacy.judge),
    ],
    ids=INPUTS,
)
def test_valid_bodies_are_accepted(bodies: Sequence[bytes], judge: Callable[[bytes], str]) -> None:
    assert {judge(body) for body in bodies} <= {"accepted", "string mode"}


def test_the_same_index_gives_the_same_input() -> None:
    assert workers.make("native", 3, 7) == workers.make("native", 3, 7) != workers.make("native", 4, 7)


def test_faults_are_found() -> None:
    """An exception, a crash, memory that is only reserved, memory that is used, and time."""
    total = Outcome()
    for outcome in fuzz("broken", 60, seed=3, processes=1):
        total.add(outcome)
    reasons = {workers.make("broken", 3, failure.index)[0]: failure.reason for failure in total.failures}
    assert set(reasons) == {1, 2, 3, 4, 5}
    assert "ValueError: a bug" in reasons[1]
    assert "status -11" in reasons[2]
    assert "MemoryError" in reasons[3]
    assert "has grown by" in reasons[4]
    assert "took" in reasons[5]
    assert total.stages["accepted"] > 0
