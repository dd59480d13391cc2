"""Several batches in one body: the bytes of the contract, and what does not add up. tests/fuzz does the rest."""

import json

import pytest

from shared import wire
from shared.api import Lease


def framed(header: object, batch: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(4, "big") + text + batch


HEADER = {"id": "a", "token": "t", "lease_seconds": 9.5, "deliveries": 1, "bytes": 2}


def test_what_is_encoded_comes_back() -> None:
    batches = {"a": b"", "é": b"xy", "c": b""}
    sent = [(Lease.model_validate(HEADER | {"id": id, "bytes": len(batch)}), batch) for id, batch in batches.items()]
    assert list(wire.decode_leases(b"".join(wire.encode_leases(sent)))) == sent


def test_the_bytes_are_those_of_the_contract() -> None:
    """As a client in another language reads them."""
    body = b"".join(wire.encode_leases([(Lease.model_validate(HEADER), b"xy")]))
    length = int.from_bytes(body[:4], "big")
    assert json.loads(body[4 : 4 + length]) == HEADER and body[4 + length :] == b"xy"


def test_a_header_may_say_more_than_this_client_knows() -> None:
    ((head, batch),) = wire.decode_leases(framed(HEADER | {"news": [1]}, b"xy"))
    assert (head.id, batch) == ("a", b"xy")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"\0", "a length of 4 bytes is claimed"),
        (framed(HEADER, b"xy") + b"\0\0", "a length of 4 bytes is claimed"),
        (framed(HEADER, b"x"), "batch 'a' of 2 bytes is claimed"),
        (framed(HEADER | {"bytes": 2**62}), "is claimed"),
        (framed(HEADER, length=4096), "a header of 4096 bytes is claimed"),
        (framed(HEADER, length=2**32 - 1), "must be at most 4096 bytes"),
        (framed(HEADER | {"bytes": -1}), "bytes"),
        (framed(HEADER | {"bytes": "2"}, b"xy"), "bytes"),
        (framed(HEADER | {"deliveries": 0}, b"xy"), "deliveries"),
        (framed(json.dumps(HEADER).replace("9.5", "1e999").encode(), b"xy"), "lease_seconds"),
        (framed(HEADER | {"token": None}, b"xy"), "token"),
        (framed({}), "id"),
        (framed([]), "object"),
        (framed(b"\xff"), "JSON"),
        (framed(b"[" * 4000), "JSON"),
        (framed(b""), "JSON"),
    ],
)
def test_what_does_not_add_up_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        list(wire.decode_leases(body))


def test_uploads() -> None:
    body = b"\0\0\0\2xy" + bytes(4) + b"\0\0\0\1z"
    assert wire.encode_uploads([b"xy", b"", b"z"]) == body
    assert list(wire.decode_uploads(body)) == [b"xy", b"", b"z"]
    for end in (1, 5, len(body) - 1):
        with pytest.raises(ValueError, match="is claimed at byte"):
            list(wire.decode_uploads(body[:end]))
