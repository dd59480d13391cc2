"""Random rollout batches: valid, with variance in the rewards, and reproducible from the seed.

Batches of given tokens come from `make_scored` (tests/policy_trainer/conftest.py), those with a model's log-probs and
everything that a batch may lack from tests/policy_trainer/proofs/batches.py.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from uuid6 import UUID, uuid7

from shared.batch import Batch, TokenGroup
from shared.client import RefServerClient
from tests.policy_trainer.vision_models import VOCABULARY

_COMPLETIONS = 4
_PROMPT_TOKENS = 8
# Of the tiny model's 265 tokens, those that stand for bytes.
_FIRST_BYTE, _LAST_BYTE = 5, 259
# Of the tiny Qwen2-VL's 144, those that are printable characters.
_FIRST_LETTER, _LETTERS = VOCABULARY["0"], 90
# Its patches are 14 x 14 pixels, of three colours and two frames.
_PATCH = 3 * 2 * 14 * 14


def make_batch(
    numbers: np.random.Generator, prompt: int, lengths: Sequence[int], *, special: bool = False, **fields: Any
) -> Batch:
    """A batch of random tokens for the demo's model: a prompt of so many, completions of these lengths.

    special: special tokens may be among them. fields: in place of the batch's.
    """
    ids = numbers.integers(0 if special else _FIRST_BYTE, _LAST_BYTE + 1, size=prompt + sum(lengths))
    values: dict[str, Any] = {
        "id": str(uuid7()), "run": "test", "epoch": 0, "policy_version": 0, "temperature": 1.0,
        "group": TokenGroup(ids[:prompt], ids[prompt:], np.array(lengths)),
        "rewards": numbers.normal(size=len(lengths)).astype(np.float32),
        "finished": np.ones(len(lengths), np.bool_),
    }  # fmt: skip
    return Batch(**values | fields)


def random_batch(chance: random.Random, run: str, *, longest: int = 10, completions: int = _COMPLETIONS) -> Batch:
    """The same with random lengths, and all of it from `chance`. longest: tokens of a completion, at most."""
    numbers = np.random.default_rng(chance.getrandbits(64))
    return make_batch(
        numbers,
        _PROMPT_TOKENS,
        numbers.integers(max(1, longest // 2), longest + 1, size=completions).tolist(),
        id=str(UUID(int=chance.getrandbits(128), version=7)),
        run=run,
        rewards=numbers.permutation(np.linspace(0, 1, completions, dtype=np.float32)),
    )


def seeing_batch(chance: random.Random, run: str) -> Batch:
    """The same for a tiny Qwen2-VL; every second has one or two pictures."""
    batch = random_batch(chance, run)
    prompt, completions = (
        _FIRST_LETTER + ids % _LETTERS for ids in (batch.group.prompt_ids, batch.group.completion_ids)
    )
    images = {}
    if count := chance.choice((0, 0, 1, 2)):
        grid = np.tile([[1, 2, 2]], (count, 1))
        pixels = np.random.default_rng(chance.getrandbits(64)).standard_normal((4 * count, _PATCH))
        images = {"pixel_values": pixels.astype(np.float32), "image_grid_thw": grid}
        prompt = np.concatenate([[VOCABULARY["<|image_pad|>"], _FIRST_LETTER] * count, prompt])
    return replace(batch, group=TokenGroup(prompt, completions, batch.group.completion_lengths, images))


def with_sampler_logps(batch: Batch, server: RefServerClient) -> Batch:
    """The batch as if the server's own model had sampled it."""
    return replace(batch, sampler_logps=server.score(batch).ref_logps)
