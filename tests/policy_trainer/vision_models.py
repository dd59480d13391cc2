"""Tiny vision-language models of each family: random weights, a tokenizer of characters, and the family's own processor
of pictures, as `save_pretrained` writes them."""

import json
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

_SPECIAL = [
    "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>",
    "<|vision_end|>", "<image>", "<start_of_image>", "<end_of_image>", "<image_soft_token>",
    "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
]  # fmt: skip
VOCABULARY = {token: place for place, token in enumerate([*_SPECIAL, *string.printable, "[UNK]"])}
ROWS = 144
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{% for block in message.content %}"
    "{% if block.type == 'image' %}PICTURE{% else %}{{ block.text }}{% endif %}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """config: what differs from the family's default. processor: of its image processor. settings: of its processor.
    picture: what its chat template writes for a picture. token: which placeholder it expands to."""

    model_type: str
    config: dict[str, Any]
    image_processor: Callable[[], Any]
    settings: dict[str, Any]
    picture: str
    token: str


def _text(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 0, **more,
    }  # fmt: skip


def _qwen_processor(patch: int) -> Callable[[], Any]:
    def make() -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil(patch_size=patch, min_pixels=(2 * patch) ** 2, max_pixels=16 * (2 * patch) ** 2)

    return make


def _qwen(model_type: str, vision: dict[str, Any], rope: dict[str, Any], patch: int, **text: Any) -> Family:
    ids = {f"{kind}_token_id": VOCABULARY[f"<|{kind}_pad|>"] for kind in ("image", "video")}
    marks = {f"vision_{kind}_token_id": VOCABULARY[f"<|vision_{kind}|>"] for kind in ("start", "end")}
    return Family(
        model_type,
        {"text_config": _text(rope_parameters=rope, **text), "vision_config": vision, **ids, **marks},
        _qwen_processor(patch),
        {},
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|image_pad|>",
    )


_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip


def _gemma3_processor() -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return Gemma3ImageProcessorPil(size={"height": 28, "width": 28})


def _llava_processor() -> Any:
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    return LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=[[28, 56], [56, 28]]
    )


def _smolvlm_processor() -> Any:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    return SmolVLMImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})


FAMILIES = {
    "qwen2_vl": _qwen(
        "qwen2_vl",
        {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 14, "mlp_ratio": 2},
        _MROPE,
        14,
    ),
    "qwen2_5_vl": _qwen(
        "qwen2_5_vl",
        {
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32,
            "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1],
        },
        _MROPE,
        14,
    ),
    "qwen3_vl": _qwen(
        "qwen3_vl",
        {
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32,
            "patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        },
        {**_MROPE, "mrope_interleaved": True},
        16,
    ),
    "qwen3_5": _qwen(
        "qwen3_5",
        {
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32,
            "patch_size": 16, "num_position_embeddings": 16,
        },
        {**_MROPE, "mrope_interleaved": True},
        16,
        layer_types=["linear_attention", "full_attention"],
        **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 2),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    ),
    "gemma3": Family(
        "gemma3",
        {
            "text_config": _text(sliding_window=64, layer_types=["sliding_attention", "full_attention"]),
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 4,
            "image_token_index": VOCABULARY["<image_soft_token>"],
            "boi_token_index": VOCABULARY["<start_of_image>"],
            "eoi_token_index": VOCABULARY["<end_of_image>"],
        },
        _gemma3_processor,
        {"image_seq_length": 4},
        "<start_of_image>",
        "<image_soft_token>",
    ),
    "llava_next": Family(
        "llava_next",
        {
            "text_config": _text(model_type="llama"),
            "vision_config": {**_SIGLIP, "model_type": "clip_vision_model"},
            "image_grid_pinpoints": [[28, 56], [56, 28]],
            "image_token_index": VOCABULARY["<image>"],
        },
        _llava_processor,
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "<image>",
        "<image>",
    ),
    "smolvlm": Family(
        "smolvlm",
        {
            "text_config": _text(model_type="llama"),
            "vision_config": _SIGLIP,
            "scale_factor": 2,
            "image_token_id": VOCABULARY["<image>"],
        },
        _smolvlm_processor,
        {"image_seq_len": 4},
        "<image>",
        "<image>",
    ),
}  # fmt: skip


def _llava_1_processor() -> Any:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    return CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})


def _idefics3_processor() -> Any:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    return Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})


# Families that are not supported with pictures.
OTHERS = {
    "llava": Family(
        "llava",
        {
            "text_config": _text(model_type="llama"),
            "vision_config": {**_SIGLIP, "model_type": "clip_vision_model"},
            "image_token_index": VOCABULARY["<image>"],
        },
        _llava_1_processor,
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "<image>",
        "<image>",
    ),
    "idefics3": Family(
        "idefics3",
        {
            "text_config": _text(model_type="llama"),
            "vision_config": _SIGLIP,
            "scale_factor": 2,
            "image_token_id": VOCABULARY["<image>"],
        },
        _idefics3_processor,
        {"image_seq_len": 4},
        "<image>",
        "<image>",
    ),
}


def make_vision_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    inner.add_special_tokens(_SPECIAL)
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|end|>",
        pad_token="<|end|>",
        unk_token="[UNK]",
        extra_special_tokens={
            "image_token": family.token, "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
            "video_token": "<|video_pad|>",
        },
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = _TEMPLATE.replace("PICTURE", family.picture)
    return tokenizer


def make_vision_model(family: Family, *, seed: int = 0) -> PreTrainedModel:
    config = AutoConfig.for_model(family.model_type, **family.config)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.any():  # Gemma 3 begins with a projection of 0
            torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config = GenerationConfig(eos_token_id=VOCABULARY["<|end|>"], pad_token_id=0)
    return model


def save_vision_model(family: str | Family, directory: Path, *, seed: int = 0) -> Path:
    """The directory, with a tiny model of this family, its tokenizer and its processor."""
    family = FAMILIES[family] if isinstance(family, str) else family
    make_vision_model(family, seed=seed).save_pretrained(directory)
    make_vision_tokenizer(family).save_pretrained(directory)
    family.image_processor().save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps(family.settings))
    return directory


def picture(width: int, height: int) -> Image.Image:
    """A picture whose colours differ from place to place."""
    size = width, height
    down = Image.linear_gradient("L")
    return Image.merge("RGB", [down.resize(size), down.rotate(90).resize(size), Image.new("L", size, 80)])
