"""Samples with any Hugging Face language model: a prompt is computed once for its group, and finished rows are
dropped."""

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

from policy_trainer.adapters import AddedAdapters, MergedAdapters
from policy_trainer.config import CommonConfig, LoraConfig
from policy_trainer.data.completion import Completion
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.quantised import is_quantised, load_base
from policy_trainer.sampling.choice import takes_decoding_attention
from policy_trainer.sampling.decoders import fill_slots, make_decoder, use_attention
from policy_trainer.sampling.drawing import has_stop_text, sample_tokens, tail_length
from policy_trainer.sampling.kv_cache import prefill
from policy_trainer.sampling.running import HFRunningBatch
from policy_trainer.sampling.sampler import LoadedSampler, RunningBatch, SamplingParams
from shared.batch import TokenGroup
from shared.client.retry import OnWait
from shared.logprobs import LogprobForward, choose_forward
from shared.logprobs.attention import attention_of
from shared.logprobs.vision import placeholders_of, vision_of
from shared.models import eos_token_ids, is_adapter

# Finished rows are dropped once they are more than this share of the batch: dropping moves the other rows.
_DROP_SHARE = 0.125


class HFSampler:
    """Samples from `model`, which the caller may also train between calls; `load` replaces its weights."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._eos = torch.tensor(eos_token_ids(model, tokenizer), device=model.device)
        self._adapters = AddedAdapters(model) if is_quantised(model) else MergedAdapters(model)
        self._vision = vision_of(model)
        self._running = False
        self._forbidden = torch.tensor(placeholders_of(model), dtype=torch.long, device=model.device)

    @classmethod
    def from_config(
        cls, config: CommonConfig, tokenizer: PreTrainedTokenizerBase, on_wait: OnWait, lora: LoraConfig
    ) -> LoadedSampler:
        model = load_base(config.model, lora, revision=config.revision, device=config.device, dtype=config.dtype)
        sampler = cls(model, tokenizer)
        sampler.check()
        return sampler, model

    @classmethod
    def check_engine(cls, config: CommonConfig, lora_rank: int) -> None:
        """Nothing to check: Tandem itself needs PyTorch and transformers."""

    def load(self, model: Path) -> None:
        self._check_idle()
        if is_adapter(model):
            self._adapters.load(model)
        else:
            load_weights(self._model, model)

    def check(self) -> None:
        """Raises UserError for a model that cannot be sampled. `sample` and `running_batch` check it too."""
        _ = self._decoding_attention

    @cached_property
    def _decoding_attention(self) -> bool:
        return takes_decoding_attention(self._model)

    @torch.inference_mode()
    def logps(self, group: TokenGroup) -> np.ndarray:
        self._check_idle()
        return self._forward([group], [1.0]).cpu().numpy()

    @cached_property
    def _forward(self) -> LogprobForward:
        return choose_forward(self._model)

    @torch.inference_mode()
    def sample(self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seed: int) -> list[list[Completion]]:
        self._check_idle()
        attention = self._decoding_attention
        size = params.num_generations
        generator = torch.Generator(self._model.device).manual_seed(seed)
        ids = [prompt.ids for prompt in prompts]
        buffer = CompletionBuffer(ids, size, params.max_completion_length, self._model.device)
        prefilled = prefill(self._model, prompts, self._vision)
        decoder = make_decoder(self._model, prefilled, size, decoding_attention=attention)
        with use_attention(self._model, decoder.attention):
            logits = prefilled.logits.repeat_interleave(size, 0)
            while True:
                tokens, logps = sample_tokens(logits, params, generator, buffer.earlier, self._forbidden)
                buffer.append(tokens, logps)
                buffer.finish(self._ended(tokens, buffer, params))
                if buffer.done:
                    break
                kept = buffer.drop_finished()
                if kept is not None:
                    decoder.select(kept)
                    tokens = tokens[kept]
                logits = decoder.step(tokens)
        completions = buffer.completions(self._eos)
        return [completions[start : start + size] for start in range(0, len(completions), size)]

    @contextmanager
    def running_batch(self, params: SamplingParams, seed: int) -> Iterator[RunningBatch]:
        """The model must not be used otherwise within the block: it has another attention."""
        joins = self._decoding_attention
        self._running = True
        try:
            with use_attention(self._model, attention_of(self._model)):
                yield HFRunningBatch(self._model, self._tokenizer, self._eos, params, seed, joins=joins)
        finally:
            self._running = False

    def _check_idle(self) -> None:
        assert not self._running, "a running batch has the model"

    def _ended(self, tokens: Tensor, buffer: "CompletionBuffer", params: SamplingParams) -> Tensor:
        """bool (B,): which batch rows end with the tokens (B,) that were just appended."""
        ended = torch.isin(tokens, self._eos)
        if params.stop_token_ids:
            ended |= torch.isin(tokens, tokens.new_tensor(params.stop_token_ids))
        if params.stop:
            tails = buffer.last_tokens(tail_length(params.stop))
            stopped = [has_stop_text(self._tokenizer, tail, params.stop) for tail in tails]
            ended |= torch.tensor(stopped, device=ended.device)
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


class CompletionBuffer:
    """The tokens sampled so far: R completions, of which the model still computes B, the active batch.

    A finished completion stays in the batch, its new tokens ignored, until enough can be dropped together.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], num_generations: int, max_completion_length: int, device: torch.device
    ) -> None:
        rows, width = len(prompts) * num_generations, max(map(len, prompts))
        # Padded with a token of the prompt, so that no other token is penalised.
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
        """int64 (B, T): the tokens of each batch row's prompt and completion, in no particular order."""
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
        """int64 (B',) batch rows that are kept, in their new order; None while too few are finished to drop."""
        if len(self._rows) - self._left <= _DROP_SHARE * len(self._rows):
            return None
        slots = fill_slots(self._unfinished, self._left)
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
