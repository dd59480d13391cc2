"""Random batches for a tiny model, the same in another order, and the same as the naive loops take them."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from uuid import UUID

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.batch import Array, Batch, StepRewards, TokenGroup
from shared.sampling_mask import SamplingMask
from tests.policy_trainer.proofs.cases import REWARDS, WEIGHTS, mask_of_turns
from tests.policy_trainer.proofs.oracle import Completion

# Steps before the one that trains on the batches.
STEP = 4


# For each token of a completion, the ids that the sampler kept; none where it left none out.
Kept = Sequence[Sequence[int]]


def row_logps(
    model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int], temperature: float, kept: Kept = ()
) -> Tensor:
    """Log-probs of a single completion."""
    return row_values(model, prompt, completion, temperature, kept)[0]


def row_values(
    model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int], temperature: float, kept: Kept = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies, and the squared norms of the log-probs' gradients with respect to the logits."""
    logits = model(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).logits[0]
    logps, entropies, norms = [], [], []
    for t, token in enumerate(completion):
        ids = (kept and sorted(set(kept[t]))) or list(range(logits.shape[1]))
        of_kept = torch.log_softmax(logits[len(prompt) - 1 + t, ids] / temperature, dim=-1)
        logps.append(of_kept[ids.index(token)])
        entropies.append(-torch.stack([logp.exp() * logp for logp in of_kept.unbind()]).sum())
        norms.append(sum((float(i == token) - logp.exp()) ** 2 for i, logp in zip(ids, of_kept.unbind(), strict=True)))
    return torch.stack(logps), torch.stack(entropies), torch.stack(norms)


def random_batches(rng: random.Random, model: PreTrainedModel, count: int = 3, longest: int = 6) -> list[Batch]:
    """Ragged, of unlike sizes and temperatures, with everything that a completion may lack.

    Log-probs are near the model's, so that the clip acts on some tokens only: `tests.harness.batches` knows no model.
    """
    return [_random_batch(rng, model, number, longest) for number in range(count)]


def with_turns(rng: random.Random, batch: Batch) -> Batch:
    """The batch with the mask of completions with tools, whose answers have the sampler's log-probs 0."""
    lengths = batch.group.completion_lengths.tolist()
    mask = np.array([trained for length in lengths for trained in mask_of_turns(rng, length)])
    assert batch.sampler_logps is not None
    logps = np.where(mask, batch.sampler_logps, np.float32(0))
    return replace(batch, loss_mask=mask, sampler_logps=logps)


def _random_batch(rng: random.Random, model: PreTrainedModel, number: int, longest: int) -> Batch:
    size, words = rng.randint(2, 4), range(2, model.config.vocab_size)
    prompt = rng.choices(words, k=rng.randint(1, 4))
    rows = [rng.choices(words, k=rng.randint(1, longest)) for _ in range(size)]
    temperature = rng.choice((0.75, 1.0, 1.25))  # which float32 holds exactly, as forwards may do
    mask = _random_mask(rng, rows, words) if rng.random() < 0.5 else None
    kept = _kept(mask, [len(row) for row in rows])
    with torch.no_grad():
        logps_of_rows = torch.cat(
            [row_logps(model, prompt, row, temperature, of_row) for row, of_row in zip(rows, kept, strict=True)]
        ).tolist()
    sampler, reference, teacher = (
        np.array([min(logp + rng.gauss(0, 0.3), 0) for logp in logps_of_rows], np.float32) for _ in range(3)
    )
    versions = np.array([rng.randint(0, STEP) for _ in rows])
    rollout = Batch(
        id=str(UUID(int=(7 << 76) | (2 << 62) | number)),
        run="test",
        epoch=0,
        policy_version=int(versions.min()),
        policy_versions=versions if rng.random() < 0.5 or len(set(versions)) > 1 else None,
        temperature=temperature,
        group=TokenGroup(
            np.array(prompt), np.concatenate(rows), np.array([len(row) for row in rows]), sampling_mask=mask
        ),
        rewards=np.array([math.nan if rng.random() < 0.1 else rng.choice(REWARDS) for _ in rows], np.float32),
        finished=np.array([rng.random() < 0.8 for _ in rows]),
        sampler_logps=sampler,
        loss_mask=np.array([rng.random() < 0.8 for _ in logps_of_rows]) if rng.random() < 0.7 else None,
        steps=_random_steps(rng, rows),
        reward_parts={
            name: np.array([math.nan if rng.random() < 0.1 else rng.choice(REWARDS) for _ in rows], np.float32)
            for name in WEIGHTS
        },
    )
    return replace(rollout, ref_logps=reference, reference_version="0", teacher_logps=teacher)


def _random_mask(rng: random.Random, rows: Sequence[Sequence[int]], words: Sequence[int]) -> SamplingMask:
    tokens = [token for row in rows for token in row]
    kept = [rng.sample([token, *rng.sample(words, k=10)], k=11) if rng.random() < 0.7 else [] for token in tokens]
    kept = [[token] if ids and rng.random() < 0.1 else ids for token, ids in zip(tokens, kept, strict=True)]
    return SamplingMask.of([np.array(ids, np.int32) for ids in kept])


def _kept(mask: SamplingMask | None, lengths: Sequence[int]) -> list[Kept]:
    """For each completion of these lengths."""
    if mask is None:
        return [() for _ in lengths]
    ids = iter(np.split(mask.token_ids, np.cumsum(mask.counts)[:-1]))
    return [[next(ids).tolist() for _ in range(length)] for length in lengths]


def _random_steps(rng: random.Random, rows: Sequence[Sequence[int]]) -> StepRewards:
    ends = [sorted(rng.sample(range(len(row)), rng.randint(0, min(3, len(row))))) for row in rows]
    return StepRewards(
        rewards=np.array([math.nan if rng.random() < 0.05 else rng.choice(REWARDS) for row in ends for _ in row], "f4"),
        ends=np.array([end for row in ends for end in row], np.int64),
        counts=np.array([len(row) for row in ends]),
    )


def permuted(rng: random.Random, batch: Batch) -> Batch:
    """The same completions in another order."""
    group, steps = batch.group, batch.steps
    assert batch.sampler_logps is not None and steps is not None
    assert batch.ref_logps is not None and batch.teacher_logps is not None
    order = rng.sample(range(group.size), group.size)

    def moved(values: Array, lengths: Array) -> Array:
        parts = np.split(values, np.cumsum(lengths)[:-1])
        return np.concatenate([parts[place] for place in order])

    def tokens(values: Array) -> Array:
        return moved(values, group.completion_lengths)

    mask = group.sampling_mask
    if mask is not None:
        parts = mask.split(np.cumsum(group.completion_lengths)[:-1])
        mask = SamplingMask.join([parts[place] for place in order], group.completion_lengths[order].tolist())
    return replace(
        batch,
        group=TokenGroup(
            group.prompt_ids, tokens(group.completion_ids), group.completion_lengths[order], sampling_mask=mask
        ),
        rewards=batch.rewards[order],
        reward_parts={name: part[order] for name, part in batch.reward_parts.items()},
        finished=batch.finished[order],
        sampler_logps=tokens(batch.sampler_logps),
        loss_mask=None if batch.loss_mask is None else tokens(batch.loss_mask),
        policy_versions=None if batch.policy_versions is None else batch.policy_versions[order],
        steps=StepRewards(
            rewards=moved(steps.rewards, steps.counts),
            ends=moved(steps.ends, steps.counts),
            counts=steps.counts[order],
        ),
        ref_logps=tokens(batch.ref_logps),
        teacher_logps=tokens(batch.teacher_logps),
    )


def completions_of(model: PreTrainedModel, batches: Sequence[Batch]) -> list[list[Completion]]:
    """As the naive loops take them, with the log-probs of this model; `old` are the sampler's."""
    return [_completions(model, batch) for batch in batches]


def _completions(model: PreTrainedModel, batch: Batch) -> list[Completion]:
    assert batch.sampler_logps is not None and batch.ref_logps is not None
    lengths, none = batch.group.completion_lengths, np.zeros(0, np.int64)
    steps = batch.steps or StepRewards(
        rewards=np.zeros(0, np.float32), ends=none, counts=np.zeros(len(lengths), np.int64)
    )
    teacher = batch.ref_logps if batch.teacher_logps is None else batch.teacher_logps
    tokens = list(pairwise([0, *np.cumsum(lengths).tolist()]))
    places = list(pairwise([0, *np.cumsum(steps.counts).tolist()]))
    mask = np.ones(lengths.sum(), bool) if batch.loss_mask is None else batch.loss_mask
    oldest, versions = batch.policy_version, batch.policy_versions
    prompt = batch.group.prompt_ids.tolist()
    values = [
        row_values(model, prompt, ids.tolist(), batch.temperature, kept)
        for ids, kept in zip(batch.group.completions(), _kept(batch.group.sampling_mask, lengths.tolist()), strict=True)
    ]
    return [
        Completion(
            reward=float(batch.rewards[row]),
            logps=list(logps.unbind()),
            old=batch.sampler_logps[slice(*tokens[row])].tolist(),
            sampler=batch.sampler_logps[slice(*tokens[row])].tolist(),
            reference=batch.ref_logps[slice(*tokens[row])].tolist(),
            mask=mask[slice(*tokens[row])].tolist(),
            entropies=list(entropies.unbind()),
            finished=bool(batch.finished[row]),
            staleness=STEP - (oldest if versions is None else int(versions[row])),
            parts=[
                (weight, float(batch.reward_parts[name][row]))
                for name, weight in WEIGHTS.items()
                if name in batch.reward_parts
            ],
            teacher=teacher[slice(*tokens[row])].tolist(),
            steps=[(float(steps.rewards[place]), int(steps.ends[place])) for place in range(*places[row])],
            norms=norms.tolist(),
        )
        for row, (logps, entropies, norms) in enumerate(values)
    ]
