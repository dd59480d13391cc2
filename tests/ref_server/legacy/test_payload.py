"""The stored form: it keeps what was uploaded, and holds no pickle."""

import json
import pickletools

import numpy as np
import pytest
import safetensors.torch
import torch

from ref_server.legacy.upload import LegacyUpload, read_payload, register_reader, scored_frame, write_payload
from ref_server.scoring.jobs import encode_scores
from ref_server.scoring.jobs import read_payload as read_any_payload
from ref_server.scoring.reference import Scores
from shared.api import LEGACY_RUN
from shared.batch import BatchError
from tests.ref_server.legacy.blobs import GEN_LOGPS, INPUTS, REWARDS
from tests.ref_server.legacy.simple_grpo import bytes_list_to_list, bytes_to_tensor

BASE = '{"plen": 3, "q": "\\u00e4 ä"}'
LOGPS = [np.array([-1.0, -2.0], dtype=np.float32), np.array([-3.0, -4.0], dtype=np.float32)]

SCORES = encode_scores([], Scores(LOGPS, 7))


def stored(**tensors: torch.Tensor) -> bytes:
    return write_payload(LegacyUpload(BASE, 3, **{"inputs": INPUTS, "rewards": REWARDS, **tensors}))


def frame(scores: Scores, **tensors: torch.Tensor) -> bytes:
    body = stored(**tensors)
    groups, _ = read_payload(body)
    return scored_frame(body, encode_scores(groups, scores))


def test_the_scoring_loop_reads_it() -> None:
    register_reader()
    groups, temperatures = read_any_payload(LEGACY_RUN, stored())
    assert [group.completion_ids.tolist() for group in groups] == [[3, 4], [8, 9]]
    assert list(temperatures) == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_an_upload_survives_storing(dtype: torch.dtype) -> None:
    rewards = torch.tensor([float("nan"), -0.5], dtype=dtype)
    gen_logps = GEN_LOGPS.to(dtype) - torch.tensor(1e-3, dtype=dtype)
    parts = bytes_list_to_list(frame(Scores(LOGPS, 7), rewards=rewards, gen_logps=gen_logps))
    assert parts[0].decode() == BASE
    inputs, got_rewards, refs, got_gen_logps = map(bytes_to_tensor, parts[1:])
    assert torch.equal(inputs, INPUTS)
    assert (got_rewards.dtype, got_gen_logps.dtype, refs.dtype) == (dtype, dtype, torch.float32)
    assert torch.equal(got_rewards.view(torch.uint8), rewards.view(torch.uint8))
    assert torch.equal(got_gen_logps, gen_logps)
    assert refs.tolist() == [[-1.0, -2.0], [-3.0, -4.0]]


def test_no_pickle_is_stored() -> None:
    body = stored(gen_logps=GEN_LOGPS)
    assert set(safetensors.torch.load(body)) == {"inputs", "rewards", "gen_logps"}
    metadata = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])["__metadata__"]
    assert metadata == {"format": "legacy-batch/1", "base": BASE}
    with pytest.raises(ValueError):
        pickletools.dis(body)


def test_log_probs_that_are_not_finite_are_not_delivered() -> None:
    with pytest.raises(BatchError, match="finite"):
        frame(Scores([LOGPS[0], LOGPS[1] * np.float32(np.inf)], 7))


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:40], lambda b: b"", lambda b: b"\xff" * 8 + b[8:]])
def test_a_damaged_body_is_refused(damage) -> None:
    with pytest.raises(BatchError):
        read_payload(damage(stored()))
    with pytest.raises(BatchError):
        scored_frame(damage(stored()), SCORES)
    with pytest.raises(BatchError):
        scored_frame(stored(), damage(SCORES))
