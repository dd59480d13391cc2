"""Random rollout batches: valid, with variance in the rewards, and reproducible from the seed."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
from uuid6 import UUID, uuid7

from shared.batch import RolloutBatch, TokenGroup
from shared.client import RefServerClient

_COMPLETIONS = 4
_PROMPT_TOKENS = 8
# Of the tiny model's 265 tokens, those that stand for bytes.
_FIRST_TOKEN, _LAST_TOKEN = 5, 260


def random_batch(
    chance: random.Random, run: str, *, longest: int = 10, completions: int = _COMPLETIONS
) -> RolloutBatch:
    """longest: tokens of a completion, at most."""
    numbers = np.random.default_rng(chance.getrandbits(64))
    lengths = numbers.integers(max(1, longest // 2), longest + 1, size=completions)
    ids = numbers.integers(_FIRST_TOKEN, _LAST_TOKEN, size=_PROMPT_TOKENS + int(lengths.sum()))
    return RolloutBatch(
        id=str(UUID(int=chance.getrandbits(128), version=7)),
        run=run,
        epoch=0,
        policy_version=0,
        temperature=1.0,
        group=TokenGroup(ids[:_PROMPT_TOKENS], ids[_PROMPT_TOKENS:], lengths),
        rewards=numbers.permutation(np.linspace(0, 1, completions, dtype=np.float32)),
        finished=np.ones(completions, dtype=bool),
    )


def plain_batch(run: str, completions: int = 4, length: int = 4, **fields: Any) -> RolloutBatch:
    """A batch of equally long completions, which the same tokens repeat; rewards differ."""
    group = TokenGroup(np.array([3, 4]), np.full(completions * length, 5), np.full(completions, length))
    values: dict[str, Any] = {
        "id": str(uuid7()), "run": run, "epoch": 0, "policy_version": 0, "temperature": 1.0, "group": group,
        "rewards": np.arange(completions, dtype=np.float32), "finished": np.ones(completions, np.bool_),
        "sampler_logps": np.full(completions * length, -1.0, np.float32),
    }  # fmt: skip
    return RolloutBatch(**values | fields)


def with_sampler_logps(batch: RolloutBatch, server: RefServerClient) -> RolloutBatch:
    """The batch as if the server's own model had sampled it."""
    return replace(batch, sampler_logps=server.score(batch).ref_logps)
