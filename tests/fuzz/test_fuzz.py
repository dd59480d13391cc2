"""A short run of the fuzzer: it reaches every stage, and every input is accepted or refused."""

import pytest

from tests.fuzz import images, leases, legacy, native, uploads
from tests.fuzz.workers import Outcome, fuzz

# Fewer for the legacy decoder and for images, which are slower.
INPUTS = {"native": 8_000, "images": 1_000, "uploads": 8_000, "leases": 8_000, "legacy": 2_000}
STAGES = {
    "native": {*native.STAGES.values(), "accepted"},
    "images": {*images.STAGES.values(), "accepted"},
    "uploads": {*uploads.STAGES.values(), "accepted"},
    "leases": {*leases.STAGES.values(), "accepted"},
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
