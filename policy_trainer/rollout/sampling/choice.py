"""Chooses how to decode a model: the fastest method that agrees with a plain forward, row by row."""

import logging
from collections.abc import Sequence
from functools import partial
from itertools import cycle, islice

import torch
from torch import Tensor
from transformers import PreTrainedModel

from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.rollout.sampling.decoders import (
    Decoding,
    SharedPromptDecoder,
    fill_slots,
    make_decoder,
    use_attention,
)
from policy_trainer.rollout.sampling.kv_cache import prefill
from shared.batch import TokenGroup
from shared.errors import UserError, brief
from shared.logprobs import self_test_difference, vision_of
from shared.logprobs.choice import self_test_tolerance
from shared.logprobs.forked import modules_with_state
from shared.logprobs.padded import rope_depends_on_length
from shared.spelling import spell_setting

log = logging.getLogger(__name__)


# Steps of the self-test in which rows share their prompts: more than the windows of a shortened model have tokens.
_SHARED_STEPS = 6


@torch.no_grad()
def choose_decoding(model: PreTrainedModel) -> Decoding:
    """The fastest way that samples correctly from this model.

    Raises UserError if none does, as when a model keeps no cache or treats padding as tokens.
    """
    errors: dict[str, str] = {}
    for decoding in _candidates(model):
        name = decoding.value
        try:
            # The coarser dtype is that of computation: ranks keep float32 weights and compute in bfloat16, and some
            # families, such as Nemotron-H, return float32 logits of bfloat16 weights.
            logits = prefill(model, [EncodedPrompt([0])], None).logits
            dtype = min(model.dtype, logits.dtype, key=lambda each: each.itemsize)
            difference = self_test_difference(model, partial(_decoded, model, decoding), dtype)
        except Exception as error:  # an unsupported architecture may raise anything
            errors[name] = str(error) if isinstance(error, UserError) else brief(error)
        else:
            if difference <= self_test_tolerance(dtype):
                return decoding
            errors[name] = f"differs from a plain forward by {difference:.2g} of the log-probs' standard deviation"
        log.info("%s is not used: %s", name, errors[name])
    raise UserError(
        f"model: {type(model).__name__} cannot be sampled with transformers: {errors}",
        f"use {spell_setting('sampler', 'vllm')}, or a model of another family (docs/models.md)",
    )


def _candidates(model: PreTrainedModel) -> Sequence[Decoding]:
    """Leaves out what the self-test could not see: where the longest of the rows that are computed together sets the
    rotary frequencies of all."""
    interface = getattr(model, "_supports_attention_backend", False) or any(modules_with_state(model))
    return [*Decoding] if interface and not rope_depends_on_length(model) else [Decoding.REPEATED]


def _decoded(
    model: PreTrainedModel, decoding: Decoding, groups: Sequence[TokenGroup], temperatures: Sequence[float]
) -> Tensor:
    """float32 (sum of C,): the log-probs of the groups' tokens, computed as when sampling: after padded prompts, token
    by token, and without rows that have ended."""
    size = max(group.size for group in groups)  # smaller groups repeat their completions
    rows = [ids for group in groups for ids in islice(cycle(group.completions()), size)]
    heat = torch.tensor(temperatures, device=model.device).repeat_interleave(size)[:, None]
    prompts = [EncodedPrompt(group.prompt_ids.tolist(), group.images) for group in groups]
    prefilled = prefill(model, prompts, vision_of(model))
    each_prompt = torch.arange(len(prompts), device=model.device)
    owners = each_prompt.repeat_interleave(size)
    if decoding is Decoding.SHARED:
        decoder = SharedPromptDecoder(model, prefilled, owners)
    else:
        decoder = make_decoder(model, prefilled, owners, decoding)
    logps = torch.zeros(len(rows), max(map(len, rows)), device=model.device)
    active, logits = torch.arange(len(rows), device=model.device), prefilled.logits.repeat_interleave(size, 0)
    with use_attention(model, decoder.attention):
        for column in range(logps.shape[1]):
            if column == _SHARED_STEPS and isinstance(decoder, SharedPromptDecoder):
                decoder = decoder.copied()
            tokens = torch.tensor([int(rows[row][column]) for row in active.tolist()], device=model.device)
            scores = (logits.float() / heat[active]).log_softmax(dim=1)
            logps[active, column] = scores.gather(1, tokens[:, None])[:, 0]
            longer = torch.tensor([len(rows[row]) > column + 1 for row in active.tolist()], device=model.device)
            if not longer.any():
                break
            if not longer.all():
                kept = fill_slots(longer, int(longer.sum()))
                decoder.select(kept)
                active, tokens = active[kept], tokens[kept]
            logits = decoder.step(tokens)
    wanted = [place * size + row for place, group in enumerate(groups) for row in range(group.size)]
    return torch.cat([logps[row, : len(rows[row])] for row in wanted])
