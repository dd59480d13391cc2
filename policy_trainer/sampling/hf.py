"""Samples with any Hugging Face causal LM: a prompt is computed once for its group, and finished rows are dropped."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.data.completion import Completion
from policy_trainer.sampling.completion_buffer import CompletionBuffer
from policy_trainer.sampling.decoders import make_decoder
from policy_trainer.sampling.merged_adapters import MergedAdapters
from policy_trainer.sampling.next_token import sample_tokens
from policy_trainer.sampling.prefill import prefill
from policy_trainer.sampling.repetition import make_repetition
from policy_trainer.sampling.sampler import SamplingParams
from shared.batch import TokenGroup
from shared.logprobs import LogprobForward, choose_forward
from shared.models import eos_token_ids, is_adapter


class HFSampler:
    """Samples from `model`, which the caller may also train between calls; `load` replaces its weights."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._eos = torch.tensor(eos_token_ids(model, tokenizer), device=model.device)
        self._adapters = MergedAdapters(model)

    def load(self, model: Path) -> None:
        if is_adapter(model):
            self._adapters.load(model)
        else:
            load_weights(self._model, model)

    @torch.inference_mode()
    def logps(self, group: TokenGroup) -> np.ndarray:
        return self._forward([group], [1.0]).cpu().numpy()

    @cached_property
    def _forward(self) -> LogprobForward:
        return choose_forward(self._model)

    @torch.inference_mode()
    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int) -> list[list[Completion]]:
        size = params.num_generations
        generator = torch.Generator(self._model.device).manual_seed(seed)
        buffer = CompletionBuffer(len(prompts) * size, params.max_completion_length, self._model.device)
        prefilled = prefill(self._model, prompts)
        decoder = make_decoder(self._model, prefilled, size)
        repetition = make_repetition(params.repetition_penalty, prompts, size, self._model.device)
        with use_attention(self._model, decoder.attention):
            logits = prefilled.logits.repeat_interleave(size, 0)
            while True:
                tokens, logps = sample_tokens(logits, params, generator, repetition)
                buffer.append(tokens, logps)
                repetition.append(tokens)
                buffer.finish(self._ended(tokens, buffer, params.stop))
                if buffer.done:
                    break
                kept = buffer.drop_finished()
                if kept is not None:
                    decoder.select(kept)
                    repetition.select(kept)
                    tokens = tokens[kept]
                logits = decoder.step(tokens)
        completions = buffer.completions(self._eos)
        return [completions[start : start + size] for start in range(0, len(completions), size)]

    def _ended(self, tokens: Tensor, buffer: CompletionBuffer, stop: tuple[str, ...]) -> Tensor:
        """bool (B,): which batch rows end with the tokens (B,) that were just appended."""
        ended = torch.isin(tokens, self._eos)
        if stop:
            # A token is at least one byte, so these tokens cover the longest stop text.
            tails = buffer.last_tokens(max(len(text.encode()) for text in stop) + 1)
            texts = [self._tokenizer.decode(tail) for tail in tails]
            ended |= torch.tensor([any(part in text for part in stop) for text in texts], device=ended.device)
        return ended


def load_weights(model: PreTrainedModel, directory: Path) -> None:
    """Copies the weights of a model directory into a model of the same architecture.

    Raises RuntimeError when they do not fit, OSError when they cannot be read.
    """
    saved: dict[str, Tensor] = {}
    for file in directory.glob("*.safetensors"):
        saved |= safetensors.torch.load_file(file, device=str(model.device))
    own = model.state_dict()
    if not saved.keys() <= own.keys():  # transformers saves some architectures in another layout than it computes in
        # By the model's own configuration: that of the directory could name code.
        options: dict[str, Any] = {"config": model.config, "dtype": model.dtype, "use_safetensors": True}
        saved = type(model).from_pretrained(directory, **options).state_dict()
    model.load_state_dict(saved, strict=False)
    filled = {own[name].data_ptr() for name in saved}  # tied weights are saved under one of their names
    if missing := [name for name, tensor in own.items() if tensor.data_ptr() not in filled]:
        raise RuntimeError(f"{directory} has no weights for {', '.join(missing[:3])}")


@contextmanager
def use_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Sets the attention implementation, and restores the previous one: the same model may be in training."""
    previous: Any = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)
