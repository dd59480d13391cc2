"""The frame of the Simple-GRPO byte protocol: `u32 big-endian count`, then `count` times `u32 length, bytes`."""

from collections.abc import Sequence

MAX_PARTS = 5
_U32_BYTES = 4


class MalformedUpload(ValueError):
    """The upload is not one of the byte protocol; the message says why."""


def split_frame(body: bytes) -> list[memoryview]:
    """The parts of a frame, as views into it: nothing is copied, whatever lengths it claims. Raises MalformedUpload."""
    count = _u32(body, 0)
    if count > MAX_PARTS:
        raise MalformedUpload(f"the frame claims {count} parts; at most {MAX_PARTS} are taken")
    parts, start = [], _U32_BYTES
    for number in range(count):
        length = _u32(body, start)
        start += _U32_BYTES
        if length > len(body) - start:
            raise MalformedUpload(f"part {number} claims {length} bytes; {len(body) - start} are left")
        parts.append(memoryview(body)[start : start + length])
        start += length
    if start != len(body):
        raise MalformedUpload(f"{len(body) - start} bytes follow the last of {count} parts")
    return parts


def join_frame(parts: Sequence[bytes]) -> bytes:
    """The inverse of `split_frame`."""
    assert len(parts) <= MAX_PARTS
    return b"".join([_to_u32(len(parts)), *(piece for part in parts for piece in (_to_u32(len(part)), part))])


def _u32(body: bytes, start: int) -> int:
    if len(body) - start < _U32_BYTES:
        raise MalformedUpload(f"the frame ends at byte {len(body)}, where a count or a length should be")
    return int.from_bytes(body[start : start + _U32_BYTES], "big")


def _to_u32(number: int) -> bytes:
    return number.to_bytes(_U32_BYTES, "big")
