"""Sampling with any Hugging Face causal LM: each prompt is computed once for its group, and finished rows leave."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.data.completion import Completion
from policy_trainer.sampling.copied_prompts import CopiedPrompts
from policy_trainer.sampling.decoding import Decoding, Prompts, RepeatedPrompts, compute_prompts
from policy_trainer.sampling.draw import draw
from policy_trainer.sampling.growing import takes_our_attention
from policy_trainer.sampling.rows import Rows
from policy_trainer.sampling.sampler import SamplingParams
from policy_trainer.sampling.shared_prompts import SharedPrompts
from shared.models import eos_token_ids

# To read so few tokens G times costs less than to bring the parts of attention together.
_COPIED_TOKENS = 64


def make_decoding(model: PreTrainedModel, prompts: Prompts, num_generations: int) -> Decoding:
    if not takes_our_attention(model):
        return RepeatedPrompts(model, prompts, num_generations)
    short = prompts.mask.shape[1] <= _COPIED_TOKENS
    return (CopiedPrompts if short else SharedPrompts)(model, prompts, num_generations)


class HFSampler:
    """Holds a model of its own, so that it can sample while another process trains."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._eos = torch.tensor(eos_token_ids(model, tokenizer), device=model.device)

    def load(self, weights: Path) -> None:
        load_weights(self._model, weights)

    @torch.inference_mode()
    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int) -> list[list[Completion]]:
        size = params.num_generations
        generator = torch.Generator(self._model.device).manual_seed(seed)
        rows = Rows(len(prompts) * size, params.max_completion_length, self._model.device)
        computed = compute_prompts(self._model, prompts)
        decoding = make_decoding(self._model, computed, size)
        with using_attention(self._model, decoding.attention):
            logits = computed.logits.repeat_interleave(size, 0)
            while True:
                tokens, logps = draw(logits, params, generator)
                rows.append(tokens, logps)
                rows.end(self._ended(tokens, rows, params.stop))
                if rows.done:
                    break
                staying = rows.leave()
                if staying is not None:
                    decoding.select(staying)
                    tokens = tokens[staying]
                logits = decoding.advance(tokens)
        completions = rows.completions(self._eos)
        return [completions[start : start + size] for start in range(0, len(completions), size)]

    def _ended(self, tokens: Tensor, rows: Rows, stop: tuple[str, ...]) -> Tensor:
        """Which of the active rows (B,) ended with the (B,) tokens that they were just given."""
        ended = torch.isin(tokens, self._eos)
        if stop:
            # A token is at least a byte, so that the tail is long enough.
            tails = rows.tails(max(len(text.encode()) for text in stop) + 1)
            texts = [self._tokenizer.decode(tail) for tail in tails]
            ended |= torch.tensor([any(part in text for part in stop) for text in texts], device=ended.device)
        return ended


def load_weights(model: PreTrainedModel, file: Path) -> None:
    """Copies published weights into a model of the same architecture. Raises RuntimeError when they do not fit."""
    safetensors.torch.load_model(model, str(file), device=str(model.device))


@contextmanager
def using_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The same model may be in training, with another attention: it gets that back."""
    usual: Any = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(usual)
