"""Log-probs of one group by models of several families, whose layers do more than attend to everything: ours against
the classic padded step, as in scoring.py.

Each model is random, of about 25M parameters; its windows, chunks and kernels have the sizes of the family's models.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks import measure
from benchmarks.scoring import SIDES, Shape, compare

_COMMON: dict[str, Any] = {
    "vocab_size": measure.VOCABULARY,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# A family's model type, its configuration, and the least ratios of time: only scoring, and with the backward.
_FAMILIES: Mapping[str, tuple[str, Mapping[str, Any], float, float]] = {
    "Qwen2": ("qwen2", {}, 3.6, 3.2),
    "Gemma 3, window 512": ("gemma3_text", {"sliding_window": 512, "query_pre_attn_scalar": 64}, 3.6, 3.2),
    "Gemma 4, window 512": (
        "gemma4_text",
        {
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
            "sliding_window": 512,
            "num_kv_shared_layers": 3,
            "global_head_dim": 128,
            "num_global_key_value_heads": 3,
            "vocab_size_per_layer_input": measure.VOCABULARY,
            "hidden_size_per_layer_input": 32,
        },
        3.6,
        3.2,
    ),
    "Mistral, window 1024": ("mistral", {"sliding_window": 1024}, 3.6, 3.2),
    "Qwen3.5, gated DeltaNet": (
        "qwen3_5_text",
        {
            "linear_num_value_heads": 6,
            "linear_num_key_heads": 6,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "intermediate_size": 768,
        },
        3.3,
        3.0,
    ),
    "LFM2, short convolutions": (
        "lfm2",
        {"layer_types": ["full_attention" if layer in (2, 5, 7) else "conv" for layer in range(8)]},
        3.3,
        3.0,
    ),
    "Granite 4, Mamba 2": (
        "granitemoehybrid",
        {
            "layer_types": ["mamba"] * 6 + ["attention", "mamba"],
            "mamba_n_heads": 12,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "mamba_n_groups": 1,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 512,
        },
        3.3,
        3.0,
    ),
    "GPT-OSS, window 128": (
        "gpt_oss",
        {"sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 384},
        2.8,
        2.6,
    ),
}


def make_model(name: str) -> PreTrainedModel:
    """A random float32 model of a family, in evaluation mode."""
    torch.manual_seed(0)
    model_type, changes, *_ = _FAMILIES[name]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**_COMMON, **changes})).eval()


def shapes() -> list[Shape]:
    return [
        Shape(name, partial(make_model, name), 400, bars=((score, 1), (step, 1)))
        for name, (_, _, score, step) in _FAMILIES.items()
    ]


def run() -> None:
    seconds_of, peaks, errors_of = ([f"{side} {unit}" for side in SIDES] for unit in ("s", "MiB", "error"))
    measure.show(
        "Families: log-probs of one group (P 400), one thread, CPU seconds; errors as in `scoring`",
        ["", *seconds_of, "ratio", *peaks, "ratio", *errors_of],
        compare(shapes()),
    )
