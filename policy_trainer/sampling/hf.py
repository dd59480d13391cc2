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

from policy_trainer.adapters.adapter import read_adapter
from policy_trainer.data.completion import Completion
from policy_trainer.sampling.decoders import make_decoder
from policy_trainer.sampling.kv_cache import prefill
from policy_trainer.sampling.next_token import sample_tokens
from policy_trainer.sampling.sampler import SamplingParams
from shared.batch import TokenGroup
from shared.errors import UserError
from shared.logprobs import LogprobForward, choose_forward
from shared.models import eos_token_ids, is_adapter

# Finished rows are dropped once they are more than this share of the batch: dropping moves the other rows.
_DROP_SHARE = 0.125


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
        buffer = CompletionBuffer(prompts, size, params.max_completion_length, self._model.device)
        prefilled = prefill(self._model, prompts)
        decoder = make_decoder(self._model, prefilled, size)
        with use_attention(self._model, decoder.attention):
            logits = prefilled.logits.repeat_interleave(size, 0)
            while True:
                tokens, logps = sample_tokens(logits, params, generator, buffer.earlier)
                buffer.append(tokens, logps)
                buffer.finish(self._ended(tokens, buffer, params.stop))
                if buffer.done:
                    break
                kept = buffer.drop_finished()
                if kept is not None:
                    decoder.select(kept)
                    tokens = tokens[kept]
                logits = decoder.step(tokens)
        completions = buffer.completions(self._eos)
        return [completions[start : start + size] for start in range(0, len(completions), size)]

    def _ended(self, tokens: Tensor, buffer: "CompletionBuffer", stop: tuple[str, ...]) -> Tensor:
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
    weights = model.state_dict()
    if not saved.keys() <= weights.keys():
        # transformers saves some architectures in another layout than it computes in. This uses the model's
        # configuration, since that of the directory could name code.
        options: dict[str, Any] = {"config": model.config, "dtype": model.dtype, "use_safetensors": True}
        saved = type(model).from_pretrained(directory, **options).state_dict()
    model.load_state_dict(saved, strict=False)
    filled = {weights[name].data_ptr() for name in saved}  # tied weights are saved under one of their names
    if missing := [name for name, tensor in weights.items() if tensor.data_ptr() not in filled]:
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


class CompletionBuffer:
    """The tokens sampled so far: R completions, of which the model still computes B, the active batch.

    A finished completion stays in the batch, its new tokens ignored, until enough can be dropped together.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], num_generations: int, max_completion_length: int, device: torch.device
    ) -> None:
        rows, width = len(prompts) * num_generations, max(map(len, prompts))
        # Padded with a token of the prompt: any other token would count as one of it.
        padded = [[*prompt, *[prompt[0]] * (width - len(prompt))] for prompt in prompts]
        self._prompts = torch.tensor(padded, device=device).repeat_interleave(num_generations, 0)
        self._ids = torch.zeros(rows, max_completion_length, dtype=torch.long, device=device)
        self._logps = torch.zeros(rows, max_completion_length, device=device)
        self._lengths = torch.full((rows,), max_completion_length, device=device)
        self._finished = torch.zeros(rows, dtype=torch.bool, device=device)
        self._length = 0
        # (B,): the completion of each batch row, and whether it is unfinished.
        self._rows = torch.arange(rows, device=device)
        self._unfinished = torch.ones(rows, dtype=torch.bool, device=device)
        self._left = rows

    @property
    def done(self) -> bool:
        """Whether all completions are finished, or have the maximum length."""
        return self._left == 0 or self._length == self._ids.shape[1]

    def earlier(self) -> Tensor:
        """int64 (B, T): the tokens of each batch row's prompt and completion, without an order."""
        return torch.cat([self._prompts[self._rows], self._ids[self._rows, : self._length]], dim=1)

    def append(self, tokens: Tensor, logps: Tensor) -> None:
        """int64 (B,) tokens and float32 (B,) log-probs of the batch."""
        self._ids[self._rows, self._length] = tokens
        self._logps[self._rows, self._length] = logps
        self._length += 1

    def finish(self, ended: Tensor) -> None:
        """ended: bool (B,), rows that have ended by an EOS or stop text, at their last token or an earlier one."""
        ending = self._rows[ended & self._unfinished]
        if len(ending):
            self._lengths[ending] = self._length
            self._finished[ending] = True
            self._unfinished &= ~ended
            self._left -= len(ending)

    def drop_finished(self) -> Tensor | None:
        """int64 (B',) batch rows that are kept, in their new order; None while too few are finished to drop.

        Tail rows fill the freed slots, so that few rows move.
        """
        if len(self._rows) - self._left <= _DROP_SHARE * len(self._rows):
            return None
        kept = self._unfinished.nonzero()[:, 0]
        slots = torch.arange(self._left, device=kept.device)
        slots[~self._unfinished[: self._left]] = kept[kept >= self._left]
        self._rows = self._rows[slots]
        self._unfinished = self._unfinished[slots]
        return slots

    def last_tokens(self, count: int) -> list[list[int]]:
        """Up to `count` of the last tokens of each batch row."""
        return self._ids[self._rows, max(0, self._length - count) : self._length].tolist()

    def completions(self, eos: Tensor) -> list[Completion]:
        """All R completions. eos: int64 (E,), the ids that end a completion."""
        ids, logps = self._ids.cpu().numpy(), self._logps.cpu().numpy()
        last = self._ids.gather(1, self._lengths[:, None] - 1)[:, 0]
        ends = zip(self._lengths.tolist(), self._finished.tolist(), torch.isin(last, eos).tolist(), strict=True)
        return [
            Completion(ids[row, :length].copy(), logps[row, :length].copy(), finished, ended_with_eos)
            for row, (length, finished, ended_with_eos) in enumerate(ends)
        ]


class MergedAdapters:
    """Merges one version of an adapter after another into a model's weights.

    Each is merged into the base model's values, which are kept in main memory: adding to the weights in use and
    subtracting again would accumulate rounding errors.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """model: with the weights of the base model."""
        self._model = model
        self._base: dict[str, Tensor] = {}

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Raises OSError if the adapter cannot be read, UserError if it does not fit."""
        changes = read_adapter(directory)
        weights = self._model.state_dict()
        for name, change in changes.items():
            shape = weights[name].shape if name in weights else None
            if shape != change.shape:
                raise UserError(
                    f"model: the run's adapters do not fit this model: {name} would be {tuple(change.shape)}, and is "
                    f"{tuple(shape) if shape else 'not there'}: give the base model that the run trains adapters of"
                )
            if name not in self._base:
                self._base[name] = weights[name].to("cpu", copy=True)
        for name, base in self._base.items():
            change = changes.get(name)
            weights[name].copy_(base if change is None else change.merged(base.to(weights[name].device)))
