"""Tiny random models, batches written out by hand, and a server that says what it is told."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from policy_trainer.cli.demo.base_model import make_tokenizer
from shared.batch import Batch, TokenGroup
from tests.fuse import fuse
from tests.site import no_backoff, open_site

__all__ = ["fuse", "no_backoff", "open_site"]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(scope="session", autouse=True)
def unhurried_mathematics() -> Iterator[None]:
    """math-verify's limit is of wall time, which a busy machine uses up. Rewards that are judged apart keep theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("policy_trainer.rewards.mathematics._SECONDS", 20)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def make_tiny() -> Callable[..., PreTrainedModel]:
    """A Qwen2 of 10,000 parameters. Its weights are large, so that its log-probs are far from uniform."""

    def make(
        *,
        seed: int = 0,
        vocabulary: int = 64,
        eos: int = 1,
        tied: bool = True,
        layers: int = 2,
        dtype: torch.dtype = torch.float32,
    ) -> PreTrainedModel:
        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.3,
            tie_word_embeddings=tied,
            pad_token_id=0,
            eos_token_id=eos,
            bos_token_id=None,
        )
        model = Qwen2ForCausalLM(config).eval()
        torch.nn.Module.to(model, dtype)
        return model

    return make


@pytest.fixture
def make_scored() -> Callable[..., Batch]:
    """A scored batch from lists; log-probs that are not given are all -1."""

    def make(
        prompt: Sequence[int],
        completions: Sequence[Sequence[int]],
        rewards: Sequence[float],
        *,
        old_logps: Sequence[float] | np.ndarray | None = None,
        ref_logps: Sequence[float] | np.ndarray | None = None,
        loss_mask: Sequence[bool] | None = None,
        temperature: float = 1.0,
        version: int = 0,
        number: int = 0,
    ) -> Batch:
        lengths = [len(completion) for completion in completions]
        default = -np.ones(sum(lengths), np.float32)
        rollout = Batch(
            id=str(UUID(int=(7 << 76) | (2 << 62) | number)),
            run="test",
            epoch=0,
            policy_version=version,
            temperature=temperature,
            group=TokenGroup(
                np.array(prompt, np.int64), np.concatenate(completions).astype(np.int64), np.array(lengths, np.int64)
            ),
            rewards=np.array(rewards, np.float32),
            finished=np.ones(len(completions), np.bool_),
            sampler_logps=default if old_logps is None else np.array(old_logps, np.float32),
            loss_mask=None if loss_mask is None else np.array(loss_mask, np.bool_),
        )
        logps = default if ref_logps is None else np.array(ref_logps, np.float32)
        return replace(rollout, ref_logps=logps, reference_version="0")

    return make


@pytest.fixture
def full_disk() -> Path:
    """A file that can be opened and refuses every byte. Write to it, and never rename to it: it is the system's."""
    device = Path("/dev/full")
    if not device.is_char_device():
        pytest.skip("there is no /dev/full")
    return device
