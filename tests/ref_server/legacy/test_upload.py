"""A whole upload: reading it, refusing it, and its groups."""

from pathlib import Path

import pytest
import torch

from ref_server.legacy.tensors import MalformedUpload
from ref_server.legacy.upload import MAX_JSON_BYTES, LegacyUpload, read_upload
from tests.ref_server.legacy.blobs import GEN_LOGPS, INPUTS, REWARDS, upload
from tests.ref_server.legacy.simple_grpo import make_bytes_list, tensor_to_bytes

# `upload(gen_logps=tensor_to_bytes(GEN_LOGPS))` of blobs.py, as PyTorch 2.13 wrote it.
GOLDEN = Path(__file__).with_name("golden") / "upload.bin"


def read(body: bytes) -> LegacyUpload:
    upload = read_upload(body)
    assert upload is not None
    return upload


def test_golden_bytes() -> None:
    got = read(GOLDEN.read_bytes())
    assert (got.base, got.plen) == ('{"plen": 3}', 3)
    assert got.gen_logps is not None
    for tensor, expected in ((got.inputs, INPUTS), (got.rewards, REWARDS), (got.gen_logps, GEN_LOGPS)):
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)


def test_the_largest_json() -> None:
    base = b'{"plen": 3, "x": "' + b"x" * (MAX_JSON_BYTES - 20) + b'"}'
    assert len(base) == MAX_JSON_BYTES and read(upload(base=base)).base == base.decode()


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"base": b"\xff\xfe"}, "UTF-8"),
        ({"base": b""}, "JSON"),
        ({"base": b"[3]"}, '"plen"'),
        ({"base": b'{"plen": true}'}, '"plen"'),
        ({"base": b'{"plen": 3.0}'}, '"plen"'),
        ({"base": b'{"plen": 0}'}, r"\[1, 5\)"),
        ({"base": b'{"plen": 5}'}, r"\[1, 5\)"),
        ({"base": b'{"plen": 1' + b"0" * 4000 + b"}"}, r"\[1, 5\)"),
        ({"base": b'{"plen": 1' + b"0" * 5000 + b"}"}, "JSON"),
        ({"base": b"[" * 16_000}, "JSON"),
        ({"base": b'{"plen": 3, "x": "' + b"x" * 16_384 + b'"}'}, "16384 bytes"),
        ({"inputs": tensor_to_bytes(INPUTS.float())}, "inputs: must have dtype int64"),
        ({"inputs": tensor_to_bytes(INPUTS[0])}, "inputs must have shape"),
        ({"rewards": tensor_to_bytes(INPUTS[:, 0])}, "rewards: must have dtype float32"),
        ({"rewards": tensor_to_bytes(REWARDS[:1])}, r"rewards must have shape \(2,\), got \(1,\)"),
        ({"gen_logps": tensor_to_bytes(GEN_LOGPS[:, :1])}, r"gen_logps must have shape \(2, 2\), got \(2, 1\)"),
        ({"gen_logps": tensor_to_bytes(GEN_LOGPS + 9)}, "gen_logps must be finite and at most 0"),
        ({"gen_logps": tensor_to_bytes(GEN_LOGPS - torch.inf)}, "gen_logps must be finite and at most 0"),
        ({"rewards": tensor_to_bytes(REWARDS + 3e38)}, "rewards must lie in"),
        ({"gen_logps": tensor_to_bytes(INPUTS[:, 3:])}, "gen_logps: must have dtype"),
        ({"gen_logps": b""}, "gen_logps: must be what torch.save writes"),
        ({"gen_logps": tensor_to_bytes(GEN_LOGPS), "more": b""}, "got 5"),
    ],
)
def test_malformed_uploads(parts: dict[str, bytes], reason: str) -> None:
    with pytest.raises(MalformedUpload, match=reason):
        read_upload(upload(**parts))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_wrong_number_of_parts(count: int) -> None:
    with pytest.raises(MalformedUpload, match=f"got {count}"):
        read_upload(make_bytes_list([b"{}"] * count))


def test_an_upload_cut_anywhere_is_malformed() -> None:
    body = GOLDEN.read_bytes()
    for length in range(len(body)):
        with pytest.raises(MalformedUpload):
            read_upload(body[:length])


def test_rows_of_one_prompt_are_one_group() -> None:
    inputs = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 6, 0]])
    got = read(upload(inputs=tensor_to_bytes(inputs)))
    [group] = got.groups()
    assert group.prompt_ids.tolist() == [1, 2, 3]
    assert group.completion_ids.tolist() == [4, 5, 6, 0]
    assert group.completion_lengths.tolist() == [2, 2]
    assert got.tokens == group.tokens == 7


def test_rows_of_several_prompts_are_a_group_each() -> None:
    got = read(upload())
    assert [group.prompt_ids.tolist() for group in got.groups()] == [[0, 1, 2], [5, 6, 7]]
    assert [group.completion_ids.tolist() for group in got.groups()] == [[3, 4], [8, 9]]
    assert got.tokens == sum(group.tokens for group in got.groups()) == 10
