"""The decoder of batches: `shared.wire.decode`."""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shared import wire
from shared.batch import Batch, BatchError, StepRewards, TokenGroup
from tests.fuzz.mutations import change_bytes, change_json, integer
from tests.fuzz.stages import refused_in

_DTYPES = ("I64", "F32", "BOOL", "F64", "I32", "U8", "F16", "BF16", "U64", "F4", "C64", "?")
_WIDTHS = {"I64": 8, "F32": 4}
_NAMES = (
    *("reward/x", "reward/", "reward/\ud800", "x", "ref_logps", "step_counts", "sampler_logps"),
    *("image/pixel_values", "image/image_grid_thw", "image/x", "image/", "image/\ud800"),
)
_FLOATS = (0.0, -0.0, 1.0, np.nan, np.inf, -np.inf, 1e-45, 3.4e38)
_TEXTS = (
    *("", "0", "1", "-1", "+1", "1e308", "1e999", "nan", "0x1", "1_0", "٣", " 1", "1\n", "9" * 19, "9" * 5000),
    *("a", "\0", "é", "x" * 200, "x" * 201, "{", "[]", "[" * 9000),
    *("rollout-batch/1", "scored-batch/1", "rollout-batch/2", "scored-batch/2"),
)  # fmt: skip
# By function that refuses an input: the stage that the input has reached.
STAGES = {
    "read_header": "header",
    "check_header_size": "header",
    "parse": "names, layout, dtypes",
    "_choose_format": "metadata",
    "required": "metadata",
    "number": "metadata",
    "check_tensor": "shapes",
    "__post_init__": "lengths",
    "_check_images": "images",
    "_check_steps": "values",
    "_check_values": "values",
    "_check_metadata": "values",
    "_check_name": "values",
    "_check_id": "values",
    "_check_sample": "values",
}


@dataclass
class Draft:
    """A body before it is bytes. tensors: dtype, shape and bytes by name."""

    tensors: dict[str, tuple[str, list[int], bytes]]
    metadata: dict[str, str]

    def bytes(self, chance: random.Random) -> bytes:
        """Encodes it with tensors in random order, metadata first or last, and sometimes a changed header."""
        names = list(self.tensors)
        chance.shuffle(names)
        header: dict[str, Any] = {"__metadata__": self.metadata} if chance.random() < 0.5 else {}
        start, data = 0, []
        for name in names:
            dtype, shape, content = self.tensors[name]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + len(content)]}
            start += len(content)
            data.append(content)
        text = json.dumps(header | {"__metadata__": self.metadata}).encode()
        if chance.random() < 0.3:
            text = change_json(text, chance)
        return len(text).to_bytes(8, "little") + text + b"".join(data)


def make(chance: random.Random) -> bytes:
    """A valid body with any number of changes; about one in five only has its tensors reordered."""
    return changed(SEEDS, chance)


def changed(seeds: Sequence[bytes], chance: random.Random) -> bytes:
    draft = _draft(chance.choice(seeds))
    if chance.random() < 0.6:
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            chance.choice(_CHANGES)(draft, chance)
    body = draft.bytes(chance)
    if chance.random() < 0.2:
        body = change_bytes(body, seeds, chance)
    return body


def judge(body: bytes) -> str:
    """Returns the stage of the refusal, or `accepted`. Any exception is a fault of the decoder."""
    try:
        batch = wire.decode(body)
    except BatchError as error:
        str(error).encode()  # it is reported as UTF-8
        return refused_in(error, STAGES)
    again = wire.decode(wire.encode(batch))
    assert plain(again) == plain(batch), "it comes back as something else"
    assert wire.content_hash(wire.encode(again)) == wire.content_hash(wire.encode(batch))
    wire.content_hash(body)
    return "accepted"


def plain(value: Any) -> Any:
    """A batch as values that compare bit for bit."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Batch | TokenGroup | StepRewards):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if hasattr(value, "items"):
        return {name: plain(item) for name, item in value.items()}
    return repr(value)


def _drop_tensor(draft: Draft, chance: random.Random) -> None:
    if draft.tensors:
        del draft.tensors[chance.choice(list(draft.tensors))]


def _add_tensor(draft: Draft, chance: random.Random) -> None:
    if draft.tensors:
        draft.tensors[chance.choice(_NAMES)] = chance.choice(list(draft.tensors.values()))


def _retype(draft: Draft, chance: random.Random) -> None:
    name, (_, shape, content) = _any_tensor(draft, chance)
    draft.tensors[name] = chance.choice(_DTYPES), shape, content


def _resize(draft: Draft, chance: random.Random) -> None:
    """Longer or shorter, and the shape with it."""
    name, (dtype, shape, content) = _any_tensor(draft, chance)
    width = _WIDTHS.get(dtype, 1) * max(1, min(math.prod(shape[1:]), len(content)))
    rows = max(0, len(content) // width + chance.choice((-1, 1, 1, -100, 100)))
    draft.tensors[name] = dtype, [rows, *shape[1:]], (content + bytes(100 * width))[: rows * width]


def _reshape(draft: Draft, chance: random.Random) -> None:
    name, (dtype, shape, content) = _any_tensor(draft, chance)
    shapes = ([*shape, 1], [1, *shape], [], [integer(chance)], [integer(chance), 0], [2**32, 2**32], [1] * 300)
    draft.tensors[name] = dtype, chance.choice(shapes), content


def _set_values(draft: Draft, chance: random.Random) -> None:
    name, (dtype, shape, content) = _any_tensor(draft, chance)
    values = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        width = _WIDTHS.get(dtype, 1)
        number = integer(chance) % 2**64
        value = np.float32(chance.choice(_FLOATS)).tobytes() if dtype == "F32" else number.to_bytes(8, "little")[:width]
        place = width * chance.randrange(max(1, len(values) // width))
        values[place : place + width] = value
    draft.tensors[name] = dtype, shape, bytes(values[: len(content)])


def _exchange(draft: Draft, chance: random.Random) -> None:
    first, second = _any_tensor(draft, chance), _any_tensor(draft, chance)
    draft.tensors |= {first[0]: second[1], second[0]: first[1]}


def _set_pair(draft: Draft, chance: random.Random) -> None:
    key = chance.choice([*draft.metadata, "reference_version", "top_k", "sample", "x"])
    other = chance.choice([*draft.metadata.values()] or [""])
    draft.metadata[key] = chance.choice((other, str(integer(chance)), chance.choice(_TEXTS)))


def _drop_pair(draft: Draft, chance: random.Random) -> None:
    if draft.metadata:
        del draft.metadata[chance.choice(list(draft.metadata))]


_CHANGES: tuple[Callable[[Draft, random.Random], None], ...] = (
    *(_drop_tensor, _add_tensor, _retype, _resize, _resize, _reshape, _set_values, _set_values, _set_values),
    *(_exchange, _set_pair, _set_pair, _drop_pair),
)


def _any_tensor(draft: Draft, chance: random.Random) -> tuple[str, tuple[str, list[int], bytes]]:
    if not draft.tensors:
        draft.tensors["rewards"] = "F32", [1], bytes(4)
    name = chance.choice(list(draft.tensors))
    return name, draft.tensors[name]


def _draft(body: bytes) -> Draft:
    size = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + size])
    metadata = header.pop("__metadata__")
    data = body[8 + size :]
    tensors = {name: (x["dtype"], x["shape"], data[slice(*x["data_offsets"])]) for name, x in header.items()}
    return Draft(tensors, metadata)


def _seeds() -> tuple[bytes, ...]:
    """Batches without optional fields, with all of them, scored, with images, and of 2,000 tokens."""
    group = TokenGroup(np.arange(3), np.arange(5), np.array([2, 3]))
    least = Batch(
        id="01890a5d-ac96-774b-bcce-b302099a8057", run="run", epoch=0, policy_version=7, temperature=1.0, group=group,
        rewards=np.array([0.5, np.nan], np.float32), finished=np.array([True, False]),
    )  # fmt: skip
    everything = replace(
        least,
        sampler_logps=np.array([-1, -2, -3, -4, -5], np.float32),
        loss_mask=np.array([True, True, False, True, True]),
        policy_versions=np.array([7, 8]),
        reward_parts={"format": np.array([1, 0], np.float32), "é": np.array([np.nan, 1], np.float32)},
        steps=StepRewards(
            rewards=np.array([1, np.nan, 0], np.float32), ends=np.array([1, 0, 2]), counts=np.array([1, 2])
        ),
        top_p=0.95,
        top_k=50,
        task="gsm8k",
        index=17,
        sample='{"seed": [1, {"a": null}]}',
    )
    scored = replace(everything, ref_logps=np.array([-1, -2, -3, -4, -6], np.float32), reference_version="0")
    rows = np.full(20, 100)
    long = replace(
        least,
        group=TokenGroup(np.arange(50), np.arange(2000), rows),
        rewards=np.zeros(20, np.float32),
        finished=np.ones(20, np.bool_),
    )
    images = {
        "pixel_values": np.linspace(-1, 1, 48, dtype=np.float32).reshape(4, 12),
        "image_grid_thw": np.array([[1, 2, 2]]),
        "mask": np.ones((1, 2, 2, 2, 2), np.uint8),
    }
    seeing = replace(everything, group=replace(group, images=images))
    scored_seeing = replace(scored, group=seeing.group)
    kinds = (least, everything, everything, scored, scored, long, seeing, scored_seeing)
    return tuple(wire.encode(batch) for batch in kinds)


SEEDS = _seeds()
