"""Tiny random models of several architectures, and their greedy completions by transformers' `generate`."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from policy_trainer.data.prompts import EncodedPrompt
from tests.shared.logprobs.families import make

with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # PyTorch's, of older transformers
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

VOCABULARY = 96
NO_TOKEN = 10_000
PROMPTS = [[5], [7, 8, 9], [20, 21, 22, 23, 24, 25, 26, 27, 28], [40, 41], [50, 51, 52, 53, 54, 55]]


def gpt2() -> PreTrainedModel:
    """Learned positions, which show a wrong position id."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3)
    )


def big_code() -> PreTrainedModel:
    """One key head for all query heads."""
    return GPTBigCodeForCausalLM(
        GPTBigCodeConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3)
    )


def small() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "tie_word_embeddings": False,  # tied, a small Gemma repeats its prompt
    }


# Windows of 6 tokens, fewer than the longest prompt has; Gemma's in one of its two layers.
_MIXED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_CAPPED: dict[str, Any] = {"attn_logit_softcapping": 2.0, "attn_implementation": "eager"}
# With shared prompts, and with copied ones.
SHARING: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**small())),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**small())),
    "phi": lambda: PhiForCausalLM(PhiConfig(**small())),
    "gpt2": gpt2,
    "mistral": lambda: MistralForCausalLM(MistralConfig(**small(), sliding_window=6)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**small(), **_MIXED, **_CAPPED)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**small(), **_MIXED)),
    # Sinks, chunks, gated delta rules, convolutions, Mamba 2 next to attention, before it and without any.
    **{name: partial(make, name) for name in ("gpt-oss", "llama4", "qwen3.5", "lfm2")},
    **{name: partial(make, name) for name in ("falcon-h1", "granite4", "mamba2")},
}
# Its cache keeps latents, from which each step computes keys and values: rows cannot share them.
COPYING: dict[str, Callable[[], PreTrainedModel]] = {"deepseek-v3": partial(make, "deepseek-v3")}
# Only with transformers' cache: its attention is its own.
REPEATING: dict[str, Callable[[], PreTrainedModel]] = {
    "stablelm": lambda: StableLmForCausalLM(StableLmConfig(**small())),
}
# Older transformers do not say that it takes other attention functions.
(SHARING if GPTBigCodeForCausalLM._supports_attention_backend else REPEATING)["big code"] = big_code
ARCHITECTURES = SHARING | COPYING | REPEATING


def texts(prompts: Iterable[Sequence[int]]) -> list[EncodedPrompt]:
    """Prompts without pictures, of these token ids."""
    return [EncodedPrompt(list(ids)) for ids in prompts]


def generate(model: PreTrainedModel, prompt: Sequence[int], limit: int, **options: Any) -> list[int]:
    """transformers' greedy completion of one prompt on its own."""
    output: Any = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=limit,
        **options,
    )
    return output[0, len(prompt) :].tolist()
