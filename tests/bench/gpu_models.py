"""Random weights in the architectures that are measured, made on the device itself: nothing is downloaded."""

from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM


def _qwen2(
    layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, vocabulary: int, *, tied: bool
) -> Qwen2Config:
    return Qwen2Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )


# 0.5B, 3B and 7B are Qwen2.5 as published; `tiny` has heads of 128 channels as the larger two do, 25M and 0.5B of 64.
SIZES = {
    "tiny": _qwen2(2, 256, 512, 2, 1, 1000, tied=True),
    "25M": _qwen2(8, 384, 1024, 6, 6, 32_000, tied=True),
    "0.5B": _qwen2(24, 896, 4864, 14, 2, 151_936, tied=True),
    "3B": _qwen2(36, 2048, 11_008, 16, 2, 151_936, tied=True),
    "7B": _qwen2(28, 3584, 18_944, 28, 4, 152_064, tied=False),
}


def make_model(size: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    with device:
        model: Any = Qwen2ForCausalLM._from_config(SIZES[size], dtype=dtype)
    return model.eval()
