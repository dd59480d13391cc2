"""The next token of each row, and how likely it was."""

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from policy_trainer.sampling.sampler import SamplingParams


def draw(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(B, V) logits -> (B,) tokens and float32 (B,) log-probs at the temperature, before top-p, top-k."""
    greedy = params.temperature == 0
    logps = (logits.float() / (1.0 if greedy else params.temperature)).log_softmax(dim=1)
    tokens = logps.argmax(dim=1, keepdim=True) if greedy else _choose(_truncate(logps, params).exp(), generator)
    return tokens[:, 0], logps.gather(1, tokens)[:, 0]


def _choose(weights: Tensor, generator: torch.Generator) -> Tensor:
    """(B, V) weights that need not sum to 1 -> (B, 1) indexes, each drawn in proportion to its weight.

    The inverse of the distribution function: one random number a row, where torch.multinomial takes one a token. In
    float64, since in float32 the likely tokens would round the unlikely ones away; MPS has no float64.
    """
    dtype = torch.float32 if weights.device.type == "mps" else torch.float64
    sums = weights.cumsum(dim=1, dtype=dtype)
    # Below the last sum, so that never a token is chosen that adds nothing to the sums.
    points = sums[:, -1:] * torch.rand(len(sums), 1, dtype=dtype, device=sums.device, generator=generator)
    return torch.searchsorted(sums, points, right=True)


def _truncate(logps: Tensor, params: SamplingParams) -> Tensor:
    """-inf for the tokens that top-k and top-p leave out."""
    warpers = LogitsProcessorList()
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    return warpers(logps.new_empty(0), logps)  # type: ignore[arg-type]
