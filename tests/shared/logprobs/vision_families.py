"""Tiny random vision-language models, groups with images, and the naive computation: float64, row by row."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from shared.batch import TokenGroup
from shared.logprobs import vision_of
from tests.shared.logprobs.families import COMMON, in_double

IMAGE, VIDEO, START, END = 60, 61, 62, 63
PATCH, SIZE = 4, 16
"""Pixels of a patch's side, and of the side of models whose images have one size."""

_MROPE = {**COMMON, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": PATCH,
    "initializer_range": 0.3,
}
_GRID = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": PATCH, "initializer_range": 0.3}
_QWEN: dict[str, Any] = {
    "text_config": _MROPE,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**_QWEN, "vision_config": {**_GRID, "embed_dim": 32, "mlp_ratio": 2}},
    "qwen2_5_vl": {
        **_QWEN,
        "vision_config": {
            **_GRID,
            "out_hidden_size": 32,
            "intermediate_size": 48,
            "window_size": 4 * PATCH,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {
        **_QWEN,
        "vision_config": {
            **_GRID,
            "out_hidden_size": 32,
            "intermediate_size": 48,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 64,
        },
    },
    "qwen3_5": {
        **_QWEN,
        "text_config": {
            **_MROPE,
            **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 2),
            **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
            "layer_types": ["linear_attention", "full_attention"],
        },
        "vision_config": {
            **_GRID,
            "out_hidden_size": 32,
            "intermediate_size": 48,
            "num_position_embeddings": 64,
        },
    },
    "gemma3": {
        "text_config": {**COMMON, "sliding_window": 16},
        "vision_config": _TOWER,
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
    },
    "llava_next": {
        "text_config": {**COMMON, "model_type": "llama"},
        "vision_config": {**_TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
        "image_token_index": IMAGE,
        "image_grid_pinpoints": [[SIZE, 2 * SIZE], [2 * SIZE, SIZE], [2 * SIZE, 2 * SIZE]],
        "vision_feature_layer": -1,
    },
    "smolvlm": {
        "text_config": {**COMMON, "model_type": "llama"},
        "vision_config": _TOWER,
        "scale_factor": 2,
        "image_token_id": IMAGE,
    },
}
# The forward that is chosen for each family.
VISION_FAMILIES = dict.fromkeys(_CONFIGS, "packed")


def make_vision(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny random model of a family, in evaluation mode."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **_CONFIGS[name], initializer_range=0.3)
    model = AutoModelForImageTextToText.from_config(config, dtype=dtype).eval()
    for key, parameter in model.named_parameters():
        if key.endswith("mm_input_projection_weight"):  # 0 in a new Gemma 3, which then sees no image
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def text_ids(generator: np.random.Generator, count: int) -> np.ndarray:
    return generator.integers(3, IMAGE, size=count)


def with_images(model: PreTrainedModel, lengths: Sequence[int], *, examples: int = 1, seed: int = 0) -> TokenGroup:
    """A group whose prompt has the family's example images, `examples` times, with text before, between and after."""
    vision, generator = vision_of(model), np.random.default_rng([seed, examples, *lengths])
    assert vision is not None
    parts = [vision.example(generator) for _ in range(examples)]
    images = {name: np.concatenate([part[name] for part in parts]) for name in vision.names}
    prompt = vision.example_prompt(images, text_ids(generator, 5))
    return TokenGroup(prompt, text_ids(generator, sum(lengths)), np.array(lengths), images)


def without_images(prompt: int, lengths: Sequence[int], seed: int = 0) -> TokenGroup:
    generator = np.random.default_rng([seed, prompt, *lengths])
    return TokenGroup(text_ids(generator, prompt), text_ids(generator, sum(lengths)), np.array(lengths))


def vision_oracle(model: PreTrainedModel, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
    """(sum of C,) log-probs, row by row, with positions and masks of the model's own. Differentiable."""
    logps = []
    for group, temperature in zip(groups, temperatures, strict=True):
        start = len(group.prompt_ids)
        for completion in group.completions():
            row = torch.tensor(np.concatenate([group.prompt_ids, completion]))[None]
            logits = model(input_ids=row, use_cache=False, **_arguments(model, group, row)).logits[0, start - 1 : -1]
            logps.append((logits / temperature).log_softmax(-1).gather(1, row[0, start:, None])[:, 0])
    return torch.cat(logps)


def expected_with_images(model: PreTrainedModel, groups: Sequence[TokenGroup], temperatures: Sequence[float]) -> Tensor:
    with torch.no_grad():
        return vision_oracle(in_double(model), groups, temperatures)


def _arguments(model: PreTrainedModel, group: TokenGroup, row: Tensor) -> dict[str, Tensor]:
    """What the family's processor gives for the row besides its ids."""
    kind = model.config.model_type
    tensors = {name: torch.from_numpy(tensor) for name, tensor in group.images.items()}
    if kind == "smolvlm":
        tensors = {name: tensor[None] for name, tensor in tensors.items()}
    marks = (row == IMAGE).long()
    types = {"gemma3": "token_type_ids"} | dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"), "mm_token_type_ids"
    )
    return {**tensors, types[kind]: marks} if kind in types else tensors
