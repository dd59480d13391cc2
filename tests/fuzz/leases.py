"""The decoder of an answer with several batches: `shared.wire.decode_leases`."""

import json
import random

from shared import wire
from shared.api import Lease
from tests.fuzz.mutations import change_bytes, change_json, integer
from tests.fuzz.stages import refused_in

# By function that refuses an input: the stage that the input has reached.
STAGES = {"decode_leases": "header's length", "_cut": "lengths", "model_validate_json": "header"}


def make(chance: random.Random) -> bytes:
    """A valid body with any number of changes; about one in five has none."""
    parts = [chance.choice(_PARTS) for _ in range(chance.choice((0, 1, 1, 2, 3)))]
    body = b"".join(_framed(head, batch, chance) for head, batch in parts)
    return change_bytes(body, SEEDS, chance) if chance.random() < 0.5 else body


def judge(body: bytes) -> str:
    """Returns the stage of the refusal, or `accepted`. Any exception but ValueError is a fault of the decoder."""
    try:
        decoded = list(wire.decode_leases(body))
    except ValueError as error:
        str(error).encode()  # it is shown to people
        return refused_in(error, STAGES)
    assert sum(len(batch) for _, batch in decoded) <= len(body), "there is more than came"
    assert list(wire.decode_leases(b"".join(wire.encode_leases(decoded)))) == decoded, "it comes back as something else"
    return "accepted"


def _framed(head: bytes, batch: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.2:
        head = change_json(head, chance)
    length = integer(chance) % 2**32 if chance.random() < 0.1 else len(head)
    return length.to_bytes(4, "big") + head + batch


def _part(id: str, batch: bytes) -> tuple[bytes, bytes]:
    head = {"id": id, "token": "t" * 32, "lease_seconds": 120.0, "deliveries": 1, "bytes": len(batch)}
    return json.dumps(head).encode(), batch


_PARTS = (_part("01890a5d-ac96-774b-bcce-b302099a8057", b"a batch"), _part("é", b""), _part("x", bytes(2000)))
_HEADS = [(Lease.model_validate_json(head), batch) for head, batch in _PARTS]
SEEDS = (b"".join(wire.encode_leases(_HEADS)), b"".join(wire.encode_leases(_HEADS[:1])))
