"""Images of an upload, as a server of a tiny model of each family handles them.

They are shown as PNG files, and checked against the model. What passes the check is scored.
"""

import random
from dataclasses import replace

import numpy as np
import torch

from benchmarks.measure import batch_of
from shared import wire
from shared.batch import Array, BatchError
from shared.logprobs import choose_forward, vision_of
from shared.logprobs.forward import LogprobForward
from shared.logprobs.vision import Vision
from shared.pictures import pictures, png
from tests.fuzz import native
from tests.fuzz.stages import refused_in
from tests.shared.logprobs.vision_families import END, IMAGE, START, VIDEO, VISION_FAMILIES, make_vision, with_images

VOCABULARY = 64
_NAMES = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "x")
_NUMBERS = np.array([0, 1, 2, 2, 4, 4, 6, 8, 16, 32, -1, -2, 2**16, 2**31, 2**32, 2**62, -(2**63)])
_FLOATS = np.array([0, 1, -1, 255, 1e-45, 3e38, -3e38], np.float32)
STAGES = {
    **dict.fromkeys(native.STAGES, "decoding"),
    "check_ids": "vocabulary",
    "check": "placeholders",
    "_features": "the family's tensors",
}


def make(chance: random.Random) -> bytes:
    """A body of which any part has changed, or one that is decoded and has other images or another prompt."""
    seed = chance.choice(SEEDS)
    if chance.random() < 0.3:
        return native.changed([seed], chance)
    batch = wire.decode(seed)
    assert batch.ref_logps is None
    images, prompt = dict(batch.group.images), batch.group.prompt_ids
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if chance.random() < 0.2:
            prompt = _other_prompt(prompt, chance)
        else:
            name = chance.choice(list(images) or ["pixel_values"])
            images[name] = _other_tensor(images.get(name, _NUMBERS), chance)
    if chance.random() < 0.1:
        images.pop(chance.choice(list(images)))
    if chance.random() < 0.05:
        images[chance.choice(_NAMES)] = chance.choice(list(images.values()) or [_NUMBERS])
    try:
        return wire.encode(replace(batch, group=replace(batch.group, prompt_ids=prompt, images=images)))
    except BatchError:  # it would not be decoded either
        return seed


def judge(body: bytes) -> str:
    """Returns the stage of the refusal, or `accepted`. Any exception is a fault of the server."""
    try:
        batch = wire.decode(body)
        rollout = batch
        group = rollout.group
        for picture in pictures(group.images):
            png(picture)
        vision, forward = _MODELS.get(rollout.task or "", next(iter(_MODELS.values())))
        group.check_ids(VOCABULARY, "the model's vocabulary")
        vision.check(group)
    except BatchError as error:
        str(error).encode()
        return refused_in(error, STAGES)
    with torch.inference_mode():
        logps = forward([group], [rollout.temperature])
    assert len(logps) == len(group.completion_ids)
    return "accepted"


def _other_tensor(tensor: Array, chance: random.Random) -> Array:
    """With other rows, axes, dtype or values."""
    rows = chance.randint(1, len(tensor))
    match chance.randrange(7):
        case 0:
            return np.concatenate([tensor, tensor[:rows]])
        case 1:
            return tensor[:rows]
        case 2:
            return chance.choice((tensor.ravel(), tensor[None], tensor.T, tensor[..., None]))
        case 3:
            return tensor.astype(chance.choice((np.float32, np.uint8, np.int64)))
        case 4:
            return np.zeros_like(tensor)
        case _:
            changed = tensor.copy()
            values = _NUMBERS if tensor.dtype == np.int64 else _FLOATS
            for _ in range(chance.choice((1, 1, 2, 6))):
                changed.flat[chance.randrange(tensor.size)] = chance.choice(values)
            return changed


def _other_prompt(ids: Array, chance: random.Random) -> Array:
    place = chance.randrange(len(ids))
    kept = np.delete(ids, place) if chance.random() < 0.5 else ids
    return np.insert(kept, place, [chance.choice((IMAGE, VIDEO, START, END, 5))] * chance.choice((0, 1, 1, 4)))


def _model(name: str) -> tuple[Vision, LogprobForward]:
    model = make_vision(name)
    vision = vision_of(model)
    assert vision is not None
    return vision, choose_forward(model)


def _seed(name: str, examples: int) -> bytes:
    return wire.encode(replace(batch_of(with_images(make_vision(name), [3, 1], examples=examples)), task=name))


torch.set_num_threads(1)
_MODELS = {name: _model(name) for name in VISION_FAMILIES}
SEEDS = tuple(_seed(name, examples) for name in VISION_FAMILIES for examples in (1, 2))
