"""Samples the next token of each row from its logits."""

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from policy_trainer.sampling.sampler import SamplingParams


def sample_tokens(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(B, V) logits -> int64 (B,) tokens and float32 (B,) log-probs, at the temperature, before top-p and top-k."""
    greedy = params.temperature == 0
    logps = (logits.float() / (1.0 if greedy else params.temperature)).log_softmax(dim=1)
    tokens = logps.argmax(dim=1, keepdim=True) if greedy else _draw(_top_k_top_p(logps, params).exp(), generator)
    return tokens[:, 0], logps.gather(1, tokens)[:, 0]


def _draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """(B, V) weights, not necessarily of sum 1 -> int64 (B, 1) indexes, each drawn in proportion to its weight.

    Inverts the cumulative distribution with one random number per row; torch.multinomial draws one per token. float64,
    since in float32 likely tokens would round unlikely ones away; MPS has no float64.
    """
    dtype = torch.float32 if weights.device.type == "mps" else torch.float64
    sums = weights.cumsum(dim=1, dtype=dtype)
    # A point lies below the last sum, so that a token of weight 0 is never chosen.
    points = sums[:, -1:] * torch.rand(len(sums), 1, dtype=dtype, device=sums.device, generator=generator)
    return torch.searchsorted(sums, points, right=True)


def _top_k_top_p(logps: Tensor, params: SamplingParams) -> Tensor:
    """-inf for the tokens that top-k and top-p leave out."""
    warpers = LogitsProcessorList()
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    return warpers(logps.new_empty(0), logps)  # type: ignore[arg-type]
