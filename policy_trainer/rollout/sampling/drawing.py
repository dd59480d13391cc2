"""Draws tokens from logits, and finds stop texts in what was drawn."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from policy_trainer.rollout.sampling.sampler import SamplingParams
from shared.devices import widest_float
from shared.models import decode


def sample_tokens(
    logits: Tensor,
    params: SamplingParams,
    generator: torch.Generator,
    earlier: Callable[[], Tensor],
    forbidden: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(B, V) logits -> int64 (B,) tokens, float32 (B,) log-probs, and with sampling masks bool (B, V) kept tokens.

    The log-probs are the model's at the temperature, with sampling masks over the kept tokens: the repetition penalty,
    and without masks top-k, top-p and min-p, change only which tokens are drawn. earlier: returns int64 (B, T), the
    tokens of each row's prompt and completion so far, on which the penalty falls as in transformers and vLLM (CTRL,
    arXiv 1909.05858). forbidden: int64 (F,) ids that are never drawn.
    """
    greedy = params.temperature == 0
    temperature = 1.0 if greedy else params.temperature
    logps = weighed = (logits.float() / temperature).log_softmax(dim=1)
    if params.repetition_penalty != 1:
        penalise = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        penalised = penalise(earlier(), logits.float())  # type: ignore[arg-type]
        weighed = (penalised / temperature).log_softmax(dim=1)
    if forbidden is not None and len(forbidden):
        weighed = weighed.index_fill(1, forbidden, -torch.inf)
    if greedy:
        tokens = weighed.argmax(dim=1, keepdim=True)
        return tokens[:, 0], logps.gather(1, tokens)[:, 0], None
    likeliest = _likeliest(weighed, params)
    tokens = _draw(likeliest.exp(), generator)
    if not params.sampling_masks:
        return tokens[:, 0], logps.gather(1, tokens)[:, 0], None
    kept = likeliest > -torch.inf
    logps = logps.masked_fill(~kept, -torch.inf).log_softmax(dim=1)
    return tokens[:, 0], logps.gather(1, tokens)[:, 0], kept


def _draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """(B, V) weights, not necessarily of sum 1 -> int64 (B, 1) indexes, each drawn in proportion to its weight.

    Inverts the cumulative distribution with one random number per row; torch.multinomial draws one per token. float64,
    since in float32 likely tokens would round unlikely ones away.
    """
    dtype = widest_float(weights.device)
    sums = weights.cumsum(dim=1, dtype=dtype)
    # A point lies below the last sum, so that a token of weight 0 is never chosen.
    points = sums[:, -1:] * torch.rand(len(sums), 1, dtype=dtype, device=sums.device, generator=generator)
    return torch.searchsorted(sums, points, right=True)


def _likeliest(logps: Tensor, params: SamplingParams) -> Tensor:
    """-inf for the tokens that top-k, top-p and min-p leave out, in transformers' order."""
    warpers = LogitsProcessorList()
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(logps.new_empty(0), logps)  # type: ignore[arg-type]


def tail_length(stop: Sequence[str]) -> int:
    """How many last tokens of a completion show whether it ends with a stop text: a token is at least one byte."""
    return max(len(text.encode()) for text in stop) + 1


def has_stop_text(tokenizer: PreTrainedTokenizerBase, tail: list[int], stop: Sequence[str]) -> bool:
    """tail: a completion's last tokens, `tail_length` of them if it has so many."""
    text = decode(tokenizer, tail)
    return any(part in text for part in stop)
