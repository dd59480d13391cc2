"""Stored bodies as the scoring loop sees them."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from ref_server.scoring.payloads import read_payload
from ref_server.scoring.reference import Scores
from shared import wire
from shared.batch import BatchError, RolloutBatch, ScoredBatch

Rollout = Callable[..., RolloutBatch]


def test_a_rollout_batch_becomes_a_scored_one(rollout: Rollout) -> None:
    batch = rollout(lengths=(2, 3), temperature=0.7)
    payload = read_payload("run", wire.encode(batch))
    assert list(payload.temperatures) == [0.7]
    (group,) = payload.groups
    np.testing.assert_array_equal(group.completion_ids, batch.group.completion_ids)
    logps = -np.arange(5, dtype=np.float32)
    scored = wire.decode(payload.scored(Scores([logps], 17)))
    assert isinstance(scored, ScoredBatch)
    assert scored.reference_version == "17"
    np.testing.assert_array_equal(scored.ref_logps, logps)
    assert wire.content_hash(wire.encode(scored.rollout)) == wire.content_hash(wire.encode(batch))


def file(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"\xff" * 40, "body"),
        (file([]), "header"),
        (file({}), "format"),
        (file({"__metadata__": 1}), "__metadata__"),
        (file({"__metadata__": {}}), "format"),
        (file({"__metadata__": {"format": "pickle/1"}}), "format"),
        (file({"__metadata__": {"format": "scored-batch/1"}}), "id"),
        (file({"__metadata__": {"format": "rollout-batch/1"}}), "id"),
    ],
)
def test_a_body_that_cannot_be_scored(body: bytes, field: str) -> None:
    with pytest.raises(BatchError) as raised:
        read_payload("run", body)
    assert raised.value.field == field


def test_a_batch_that_is_scored_already_is_not_scored_again(rollout: Rollout) -> None:
    batch = rollout(lengths=(2, 3))
    body = wire.encode(ScoredBatch(batch, np.zeros(5, np.float32), "1"))
    with pytest.raises(BatchError, match="scored already"):
        read_payload("run", body)
