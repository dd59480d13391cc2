"""The decoder of the Simple-GRPO byte protocol: `ref_server.legacy.upload.read_upload`."""

import json
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ref_server.legacy.tensors import MalformedUpload, join_frame, write_tensor
from ref_server.legacy.upload import LegacyUpload, read_payload, read_stored_upload, read_upload, write_payload
from tests.fuzz.blobs import CHANGES, saved
from tests.fuzz.mutations import change_bytes, change_json, integer
from tests.fuzz.stages import refused_in

torch.set_num_threads(1)
# By function that refuses an input: the stage that the input has reached.
STAGES = {
    "split_frame": "frame",
    "_u32": "frame",
    "read_upload": "frame",
    "_read_base": "JSON",
    "_check_directory_size": "archive",
    "_checked": "archive",
    "__init__": "entries",
    "read": "entries",
    "_read_parts": "entries",
    "_parse": "pickle",
    "__post_init__": "shapes",
}

_FRAME_SHARE = 0.1

Parts = list[bytes]


def make(chance: random.Random) -> bytes:
    """A valid upload with no, one or several changes."""
    parts = list(chance.choice(SEEDS))
    for _ in range(chance.choice((0, 1, 1, 1, 1, 2, 3))):
        place = chance.randrange(len(parts)) if parts else 0
        if place == 0 or chance.random() < _FRAME_SHARE:
            _change_frame(parts, chance)
        else:
            parts[place] = chance.choice(CHANGES)(parts[place], chance)
    body = join_frame(parts[:5])
    return change_bytes(body, [join_frame(seed) for seed in SEEDS], chance) if chance.random() < 0.15 else body


def judge(body: bytes) -> str:
    """Returns the stage of the refusal, `string mode` or `accepted`. Any exception is a fault of the decoder."""
    try:
        upload = read_upload(body)
    except MalformedUpload as error:
        str(error).encode()  # it is reported as UTF-8
        return refused_in(error, STAGES)
    if upload is None:
        return "string mode"
    body = write_payload(upload)
    assert plain(read_stored_upload(body)) == plain(upload), "it is stored as something else"
    assert sum(group.tokens for group in read_payload(body)[0]) == upload.tokens
    tensors = [upload.inputs, upload.rewards, *([] if upload.gen_logps is None else [upload.gen_logps])]
    again = read_upload(join_frame([upload.base.encode(), *map(write_tensor, tensors)]))
    assert again is not None and plain(again) == plain(upload), "it comes back as something else"
    return "accepted"


def plain(upload: LegacyUpload) -> Any:
    """An upload as values that compare bit for bit."""
    tensors = (upload.inputs, upload.rewards, upload.gen_logps)
    return upload.base, upload.plen, [None if tensor is None else _bits(tensor) for tensor in tensors]


def _bits(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _change_frame(parts: Parts, chance: random.Random) -> None:
    """Changes the JSON, or deletes, inserts or shuffles parts."""
    place = chance.randrange(len(parts) + 1)
    match chance.randrange(6):
        case 0 | 1 if parts:
            parts[0] = change_json(parts[0], chance)
        case 2 if parts:
            parts[0] = json.dumps({"plen": integer(chance), "x": "y"}).encode()
        case 3:
            del parts[place : place + 1]
        case 4:
            parts.insert(place, chance.choice([b"", *chance.choice(SEEDS)]))
        case _:
            chance.shuffle(parts)


def _seeds() -> Sequence[Sequence[bytes]]:
    """Uploads as Simple-GRPO's generators send them: every float dtype, with and without log-probs, in string mode."""
    inputs = torch.arange(4 * 12).reshape(4, 12) % 7
    plain_rewards = torch.tensor([1.0, -1.0, float("nan"), 0.5])
    seeds = []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        parts = [inputs, plain_rewards.to(dtype), torch.full((4, 7), -0.5, dtype=dtype)]
        seeds.append([b'{"plen": 5}', *map(saved, parts)])
    seeds.append([b'{"plen": 5, "note": [1, null]}', saved(inputs), saved(plain_rewards)])
    long = torch.arange(16 * 200).reshape(16, 200)
    seeds.append([b'{"plen": 100}', saved(long), saved(torch.zeros(16)), saved(torch.zeros(16, 100))])
    seeds.append([b'{"Q": "2+3", "As": ["5"]}', saved(torch.zeros(1))])
    return seeds


SEEDS = _seeds()
