"""Samples with any Hugging Face language model."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import CommonConfig, LoraConfig
from policy_trainer.rollout.sampling.choice import choose_decoding
from policy_trainer.rollout.sampling.decoders import Decoding, use_attention
from policy_trainer.rollout.sampling.prepacked import prepacked
from policy_trainer.rollout.sampling.running import HFRunningBatch
from policy_trainer.rollout.sampling.sampler import LoadedSampler, RunningBatch, SamplingParams
from policy_trainer.weights.adapters import AddedAdapters, MergedAdapters
from policy_trainer.weights.quantised import is_quantised, load_base
from shared.batch import TokenGroup
from shared.client.retry import OnWait
from shared.logprobs import LogprobForward, choose_forward
from shared.logprobs.attention import attention_of
from shared.models import eos_token_ids, is_adapter


class HFSampler:
    """Samples from `model`, which the caller may also train between calls; `load` replaces its weights."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._eos = torch.tensor(eos_token_ids(model, tokenizer), device=model.device)
        self._adapters = AddedAdapters(model) if is_quantised(model) else MergedAdapters(model)
        self._running = False

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
        """Raises UserError for a model that cannot be sampled. `running_batch` checks it too."""
        _ = self._decoding

    @cached_property
    def _decoding(self) -> Decoding:
        return choose_decoding(self._model)

    @torch.inference_mode()
    def logps(self, group: TokenGroup) -> np.ndarray:
        self._check_idle()
        return self._forward([group], [1.0]).cpu().numpy()

    @cached_property
    def _forward(self) -> LogprobForward:
        return choose_forward(self._model)

    @contextmanager
    def running_batch(self, params: SamplingParams, seed: int) -> Iterator[RunningBatch]:
        """The model must not be used otherwise within the block: it has another attention, and computes with a copy of
        its weights."""
        self._check_idle()
        decoding = self._decoding
        self._running = True
        try:
            with use_attention(self._model, attention_of(self._model)), prepacked(self._model):
                yield HFRunningBatch(self._model, self._tokenizer, self._eos, params, seed, decoding)
        finally:
            self._running = False

    def _check_idle(self) -> None:
        assert not self._running, "a running batch has the model"


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
