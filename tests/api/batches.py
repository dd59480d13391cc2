"""Random batches for a tiny Qwen2-VL; every second has pictures."""

import random
from dataclasses import replace

import numpy as np

from shared.batch import RolloutBatch, TokenGroup
from tests.chaos.batches import random_batch
from tests.policy_trainer.vision_models import VOCABULARY

# Of the tiny model's 144 tokens, those that are printable characters.
_FIRST_TOKEN, _TOKENS = VOCABULARY["0"], 90
_PATCH = 3 * 2 * 14 * 14


def seeing_batch(seed: int, run: str) -> RolloutBatch:
    chance = random.Random(seed)
    batch = random_batch(chance, run)
    prompt, completions = (_FIRST_TOKEN + ids % _TOKENS for ids in (batch.group.prompt_ids, batch.group.completion_ids))
    images = {}
    if count := chance.choice((0, 0, 1, 2)):
        grid = np.tile([[1, 2, 2]], (count, 1))
        pixels = np.random.default_rng(seed).standard_normal((4 * count, _PATCH)).astype(np.float32)
        images = {"pixel_values": pixels, "image_grid_thw": grid}
        prompt = np.concatenate([[VOCABULARY["<|image_pad|>"], _FIRST_TOKEN] * count, prompt])
    return replace(batch, group=TokenGroup(prompt, completions, batch.group.completion_lengths, images))
