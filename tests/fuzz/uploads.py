"""The decoder of a body with several batches: `shared.wire.decode_uploads`."""

import random

from shared import wire
from tests.fuzz.mutations import change_bytes, integer
from tests.fuzz.stages import refused_in

# By function that refuses an input: the stage that the input has reached.
STAGES = {"_cut": "lengths"}


def make(chance: random.Random) -> bytes:
    """A valid body with any number of changes; about half have none."""
    parts = [chance.choice(_PARTS) for _ in range(chance.choice((0, 1, 1, 2, 3)))]
    body = b"".join(_framed(part, chance) for part in parts)
    return change_bytes(body, SEEDS, chance) if chance.random() < 0.5 else body


def judge(body: bytes) -> str:
    """Returns the stage of the refusal, or `accepted`. Any exception but ValueError is a fault of the decoder."""
    try:
        decoded = list(wire.decode_uploads(body))
    except ValueError as error:
        return refused_in(error, STAGES)
    assert wire.encode_uploads(decoded) == body, "it comes back as something else"
    return "accepted"


def _framed(part: bytes, chance: random.Random) -> bytes:
    length = integer(chance) % 2**32 if chance.random() < 0.1 else len(part)
    return length.to_bytes(4, "big") + part


_PARTS = (b"a batch", b"", bytes(2000))
SEEDS = (wire.encode_uploads(_PARTS), wire.encode_uploads(_PARTS[:1]))
