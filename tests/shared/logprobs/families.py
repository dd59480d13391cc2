"""Tiny random models of many families, groups to score, and the naive computation: float64, row by row."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    NanoChatConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from shared.batch import TokenGroup
from shared.logprobs.varlen import has_kernel
from tests.device import DEVICE

VOCABULARY = 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # far from uniform, so that faults are large
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
RECURRENT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 4,
    "initializer_range": 0.3,
}


def common(**changes: Any) -> dict[str, Any]:
    return {**COMMON, **changes}


# Gated delta rules, Mamba 2 and latent attention.
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
HEADS: dict[str, Any] = {"n_heads": 8, "d_head": 8, "d_state": 8, "n_groups": 1, "chunk_size": 8}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}
LLAMA4: dict[str, Any] = {
    **common(num_hidden_layers=4),
    "attention_chunk_size": 4,
    "intermediate_size_mlp": 48,
    "num_local_experts": 4,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


config_of: Any = AutoConfig.for_model
# GPT-J takes transformers' attention interface from 5.24 on.
_GPTJ = "packed" if Version(transformers.__version__) >= Version("5.24") else "padded"
FAMILIES: dict[str, tuple[Any, str]] = {
    "qwen2": (Qwen2Config(**COMMON), "packed"),
    "qwen2-tied": (Qwen2Config(**common(tie_word_embeddings=True)), "packed"),
    "qwen3": (Qwen3Config(**COMMON), "packed"),
    "llama": (LlamaConfig(**COMMON), "packed"),
    "mistral": (MistralConfig(**COMMON, sliding_window=None), "packed"),
    "mistral-window": (MistralConfig(**COMMON, sliding_window=4), "packed"),
    "mistral-window-of-the-context": (MistralConfig(**COMMON, sliding_window=256), "packed"),
    "mixtral": (MixtralConfig(**COMMON, sliding_window=None, num_local_experts=4), "packed"),
    "phi": (PhiConfig(**{k: v for k, v in COMMON.items() if k != "head_dim"}), "packed"),
    "phi3": (Phi3Config(**COMMON), "packed"),
    "olmo2": (Olmo2Config(**COMMON), "packed"),
    "gpt2": (GPT2Config(**GPT2), "packed"),
    "gpt-neox": (
        GPTNeoXConfig(**{k: v for k, v in COMMON.items() if k not in ("num_key_value_heads", "head_dim")}),
        "packed",
    ),
    "gptj": (GPTJConfig(**GPT2, rotary_dim=4), _GPTJ),
    "granite": (GraniteConfig(**COMMON, logits_scaling=8.0), "packed"),
    "cohere": (CohereConfig(**COMMON), "packed"),
    "nanochat": (NanoChatConfig(**common(num_key_value_heads=4)), "packed"),
    "gemma": (GemmaConfig(**COMMON), "packed"),
    "gemma2": (Gemma2Config(**COMMON, sliding_window=4, query_pre_attn_scalar=8), "packed"),
    "gemma2-full": (
        Gemma2Config(
            **COMMON,
            query_pre_attn_scalar=8,
            attn_logit_softcapping=None,
            final_logit_softcapping=2.0,  # low: the logits are well beyond it
            layer_types=["full_attention"] * 2,
        ),
        "packed",
    ),
    "gemma3": (Gemma3TextConfig(**common(num_hidden_layers=6), sliding_window=4, query_pre_attn_scalar=8), "packed"),
    "gpt-oss": (
        config_of("gpt_oss", **COMMON, sliding_window=4, num_local_experts=4, num_experts_per_tok=2),
        "packed",
    ),
    "llama4": (config_of("llama4_text", **LLAMA4, attn_temperature_tuning=False), "packed"),
    "llama4-tuned": (config_of("llama4_text", **LLAMA4), "padded"),  # counts places in the sequence, not in the row
    "minimax": (config_of("minimax", **COMMON, layer_types=["linear_attention", "full_attention"]), "padded"),
    "deepseek-v3": (config_of("deepseek_v3", **common(num_key_value_heads=4), **LATENT), "packed"),
    "cohere2": (config_of("cohere2", **common(num_hidden_layers=4), sliding_window=4), "packed"),
    "qwen3.5": (
        config_of("qwen3_5_text", **common(num_hidden_layers=4, initializer_range=0.1), **DELTA),
        "packed",
    ),
    "qwen3-next": (
        config_of(
            "qwen3_next",
            **common(num_hidden_layers=4, initializer_range=0.1),
            **DELTA,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        "packed",
    ),
    "lfm2": (config_of("lfm2", **COMMON, layer_types=["conv", "full_attention"]), "packed"),
    "granite4": (
        config_of(
            "granitemoehybrid",
            **COMMON,
            layer_types=["mamba", "attention"],
            logits_scaling=4.0,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=32,
            **{f"mamba_{name}": size for name, size in HEADS.items()},
        ),
        "packed",
    ),
    "falcon-h1": (
        config_of(
            "falcon_h1",
            **COMMON,
            mamba_d_ssm=64,
            lm_head_multiplier=0.5,
            **{f"mamba_{name}": size for name, size in HEADS.items()},
        ),
        "packed",
    ),
    "nemotron-h": (
        config_of(
            "nemotron_h",
            **common(num_hidden_layers=4),
            layers_block_type=["mamba", "moe", "attention", "moe"],
            mamba_num_heads=8,
            mamba_head_dim=8,
            ssm_state_size=8,
            n_groups=1,
            chunk_size=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            moe_shared_expert_intermediate_size=16,
        ),
        "packed",
    ),
    "gemma4": (
        config_of(
            "gemma4_text",
            **common(num_hidden_layers=6),
            layer_types=["sliding_attention", "full_attention"] * 3,
            sliding_window=4,
            num_kv_shared_layers=2,
            global_head_dim=16,
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=8,
        ),
        "packed",
    ),
    "jamba": (
        config_of(
            "jamba",
            **common(num_hidden_layers=4),
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=4,
            mamba_d_state=8,
            mamba_dt_rank=4,
        ),
        "packed",
    ),
    "zamba": (
        config_of(
            "zamba",
            **common(num_hidden_layers=5, num_key_value_heads=4, head_dim=16),
            n_mamba_heads=2,
            mamba_dt_rank=4,
            attention_hidden_size=64,
            attn_layer_period=2,
            attn_layer_offset=0,
        ),
        "packed",
    ),
    "mamba": (MambaConfig(**RECURRENT), "packed"),
    "mamba2": (Mamba2Config(**RECURRENT, num_heads=8, head_dim=8, n_groups=1, chunk_size=8), "packed"),
}
# Before transformers 5.21 caches had no states of layers.
OLD_CACHES = not hasattr(Cache, "get_conv_state")


def form_of(name: str, dtype: torch.dtype) -> str:
    """The forward that is chosen for a family: half precision on a GPU has a kernel for packed sequences."""
    form = FAMILIES[name][1]
    return "packed-varlen" if form == "packed" and has_kernel(dtype, DEVICE) else form


def make(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A tiny random model of a family, in evaluation mode."""
    if name == "nemotron-h" and OLD_CACHES:
        pytest.skip("this transformers computes another Nemotron-H with and without a cache")
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES[name][0])
    for key, value in changes.items():
        setattr(config, key, value)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if name.startswith("gemma2"):
        model.set_attn_implementation("eager")  # as load_model does
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the grouped matrix products know no float64
    return model


def group(prompt: int, lengths: Sequence[int], seed: int = 0) -> TokenGroup:
    ids = np.random.default_rng([seed, prompt, *lengths]).integers(0, VOCABULARY, size=prompt + sum(lengths))
    return TokenGroup(ids[:prompt], ids[prompt:], np.array(lengths, np.int64))


SHAPES: dict[str, list[TokenGroup]] = {
    "one completion": [group(5, [7])],
    "one token": [group(1, [1])],
    "prompt of one": [group(1, [3, 1, 6])],
    "rows of one": [group(4, [1, 1, 1])],
    "equal lengths": [group(6, [5, 5, 5, 5])],
    "ragged": [group(9, [1, 12, 4, 7])],
    "many groups": [group(3 + seed, [1 + seed, 8 - seed, 3], seed) for seed in range(6)],
    "long": [group(60, [90, 3]), group(2, [70])],
}


def mixed(groups: list[TokenGroup]) -> list[float]:
    """Temperatures that float32 holds exactly, as the tiled head has them in float32."""
    return [(1.0, 0.75, 1.875)[index % 3] for index in range(len(groups))]


def oracle(model: PreTrainedModel, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
    """(sum of C,) float64. Differentiable: gradients reach `model`, which should be a float64 copy."""
    return torch.stack([logps[token] for token, logps in distributions(model, groups, temperatures)])


def entropy_oracle(model: PreTrainedModel, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
    """The same of the entropies."""
    return torch.stack([-(logps.exp() * logps).sum() for _, logps in distributions(model, groups, temperatures)])


def distributions(
    model: PreTrainedModel, groups: Sequence[TokenGroup], temperatures: Sequence[float]
) -> Iterator[tuple[int, Tensor]]:
    """Each completion token, with the (V,) log-probs that predicted it."""
    for tokens, temperature in zip(groups, temperatures, strict=True):
        for completion in tokens.completions():
            row = [int(token) for token in (*tokens.prompt_ids, *completion)]
            logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0]
            for position in range(len(tokens.prompt_ids), len(row)):
                yield row[position], torch.log_softmax(logits[position - 1] / temperature, dim=-1)


def in_double(model: PreTrainedModel) -> PreTrainedModel:
    double = copy.deepcopy(model).double()
    double.set_experts_implementation("eager")  # the grouped matrix products know no float64
    return double


def expected(model: PreTrainedModel, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
    with torch.no_grad():
        return oracle(in_double(model), groups, temperatures)


def gradients(model: PreTrainedModel) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def weights(count: int) -> Tensor:
    """The factor of each log-prob in a loss, like advantages."""
    return torch.tensor(np.random.default_rng(1).normal(size=count), dtype=torch.float32)
