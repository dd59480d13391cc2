"""The frame, which trusts no length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ref_server.legacy.tensors import MAX_PARTS, MalformedUpload, join_frame, split_frame
from tests.ref_server.legacy.simple_grpo import bytes_list_to_list, make_bytes_list

GOLDEN = bytes.fromhex("00000003000000027b7d0000000000000001ff")
PARTS = [b"{}", b"", b"\xff"]


def test_golden_bytes() -> None:
    assert [bytes(part) for part in split_frame(GOLDEN)] == PARTS
    assert join_frame(PARTS) == GOLDEN


@given(st.lists(st.binary(max_size=300), max_size=MAX_PARTS))
def test_clients_and_server_read_each_other(parts: list[bytes]) -> None:
    assert [bytes(part) for part in split_frame(make_bytes_list(parts))] == parts
    assert bytes_list_to_list(join_frame(parts)) == parts


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "ends at byte 0"),
        (b"\xff\xff\xff\xff" + GOLDEN[4:], "claims 4294967295 parts"),
        (make_bytes_list([b""] * 6), "claims 6 parts"),
        (b"\0\0\0\1\xff\xff\xff\xffab", "part 0 claims 4294967295 bytes; 2 are left"),
        (GOLDEN + b"\0", "1 bytes follow"),
        (b"\0\0\0\2\0\0\0\0", "ends at byte 8"),
    ],
)
def test_malformed_frames(body: bytes, reason: str) -> None:
    with pytest.raises(MalformedUpload, match=reason):
        split_frame(body)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_malformed(body: bytes) -> None:
    try:
        parts = [bytes(part) for part in split_frame(body)]
    except MalformedUpload:
        return
    assert join_frame(parts) == body
