"""Several leased batches in one body: the answer to a lease request with `count`.

Repeated to the end: a u32 big-endian length, a JSON header of that length, and as many bytes of safetensors as it says.
"""

from collections.abc import Iterable, Iterator

from shared.api import LeasedHead

CONTENT_TYPE = "application/vnd.tandem.batches"
# Of a JSON header: ids and tokens are short.
MAX_HEADER_BYTES = 4096
_LENGTH_BYTES = 4


def encode(batches: Iterable[tuple[LeasedHead, bytes]]) -> list[bytes]:
    """The body in pieces, two for each batch: batches are not copied. Each head tells its batch's length."""
    return [piece for head, batch in batches for piece in (_head(head), batch)]


def decode(body: bytes) -> Iterator[tuple[LeasedHead, bytes]]:
    """Untrusted bytes -> each header with its batch, still encoded. Raises ValueError where they do not add up."""
    place = 0
    while place < len(body):
        length = int.from_bytes(_cut(body, place, _LENGTH_BYTES, "a length"), "big")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"a header must be at most {MAX_HEADER_BYTES} bytes, got {length}")
        place += _LENGTH_BYTES
        head = LeasedHead.model_validate_json(_cut(body, place, length, "a header"))
        place += length
        yield head, _cut(body, place, head.bytes, f"batch {head.id[:80]!r}")
        place += head.bytes


def _head(head: LeasedHead) -> bytes:
    text = head.model_dump_json().encode()
    return len(text).to_bytes(_LENGTH_BYTES, "big") + text


def _cut(body: bytes, place: int, length: int, what: str) -> bytes:
    if length > len(body) - place:
        raise ValueError(f"{what} of {length} bytes is claimed at byte {place}, and the body has {len(body)}")
    return body[place : place + length]
