"""A tiny random model of every causal architecture of the installed transformers."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ARCHITECTURES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = 96
LAYERS = 4
_HEADS = 4
# Names that architectures use for their sizes. A configuration gets those that it defines as numbers.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "encoder_hash_byte_group_vocab"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "lru_width"), 32),
    **dict.fromkeys(("out_hidden_size", "nemo_conv_channels", "ext_pw_out_channel", "input_size"), 32),
    **dict.fromkeys(("depthwise_separable_out_channel", "linear_embedding_size"), 32),
    **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim"), 32),
    **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size"), VOCABULARY),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "dim_ff"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "shared_intermediate_size", "block_ff_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"), LAYERS),
    **dict.fromkeys(("depth", "num_blocks"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "mamba_n_heads"), _HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), _HEADS),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_mamba_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "rotary_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "index_head_dim", "short_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "context_length"), 128),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "attention_chunk_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "moe_latent_size", "router_hidden_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("num_kv_shared_layers", "mamba_n_groups", "n_groups", "mamba_ngroups", "adapter_rank"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "hc_lowrank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim", "global_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_dt_rank", "chunk_size"), 8),
    **dict.fromkeys(("mamba_chunk_size", "hidden_size_per_layer_input", "laurel_rank"), 8),
    **dict.fromkeys(("mamba_num_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "index_n_heads"), 2),
    "mamba_d_ssm": 64,
    "index_topk": 64,  # more than a row has tokens
    "image_size": 32,
    "patch_size": 8,
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Multi-head latent attention has as many key heads as query heads.
_LATENT = {"num_key_value_heads": _HEADS}
# Further or different values that an architecture needs, mostly because its defaults do not fit the sizes or lack some
# kind of layer.
_BESIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "bailing_hybrid", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), _LATENT),
    **dict.fromkeys(("glm_moe_dsa", "longcat_flash", "minicpm3", "youtu", "kimi_linear"), _LATENT),
    **{name: {"head_dim": 8} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    },
    "ctrl": {"dff": 48},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": _LATENT | {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": _LATENT
    | {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        **{f"swa_{name}": 4 for name in ("num_attention_heads", "num_key_value_heads")},
        **{f"swa_{name}": 16 for name in ("q_lora_rank", "kv_lora_rank", "head_dim")},
        **{f"swa_{name}": 8 for name in ("qk_nope_head_dim", "v_head_dim")},
    },
    "gemma3": {"mm_tokens_per_image": 4, "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92},
    "gemma3n_text": {"intermediate_size": 48},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    **{name: {"layer_types": ["conv", "full_attention"] * 2} for name in ("lfm2", "lfm2_moe")},
    "hy_v4": {"initializer_range": 0.1},  # with larger weights its rounding errors exceed all tolerances
    "mamba2": {"head_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"num_key_value_heads": _HEADS, "n_mamba_heads": _HEADS},
    "zaya": {"num_experts_per_tok": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [8, 16],
        "attention_head_size": 8,
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
}
_BESIDES["gemma3n"] = {"text_config": _BESIDES["gemma3n_text"]}
_BESIDES["dots3_note"] = {
    "text_config": _BESIDES["dots3_note_text"],
    "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
}
_BESIDES["qwen4_exp"] = {"text_config": _BESIDES["qwen4_exp_text"]}


def make_tiny(architecture: str) -> PreTrainedModel:
    """A model in float32, in evaluation mode. Raises transformers' errors if the sizes do not fit."""
    torch.manual_seed(0)
    config = _shrunk(CONFIG_MAPPING[architecture](), _BESIDES.get(architecture, {}))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _shrunk(config: PreTrainedConfig, besides: dict[str, Any]) -> PreTrainedConfig:
    """A configuration of the same class with tiny sizes and the further values given for it and its parts."""
    known = config.to_dict()
    names = {config.attribute_map.get(name, name): size for name, size in _SIZES.items()}
    changes = {name: size for name, size in names.items() if isinstance(known.get(name), int)}
    changes |= {name: token for name, token in _TOKENS.items() if name in known}
    changes |= {name: True for name in ("is_decoder",) if name in known}
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        if isinstance(known.get(name), list):
            changes[name] = _kinds(known[name])
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            changes[name] = _shrunk(part, besides.get(name, {}))
    return type(config)(**changes | {name: value for name, value in besides.items() if name not in config.sub_configs})


def _kinds(layers: list[str]) -> list[str]:
    """Layers of all kinds, as many as a tiny model has."""
    kinds = list(dict.fromkeys(layers))
    return [kinds[layer % len(kinds)] for layer in range(LAYERS)]
