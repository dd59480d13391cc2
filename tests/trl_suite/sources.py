"""Descriptions of the Hub's models that TRL's scripts for tiny models read.

Tokenizers are byte-level without merges, with the real tokenizer's size and special tokens and the chat template that
TRL ships. Configurations and processors have transformers' defaults.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    FEATURE_EXTRACTOR_MAPPING,
    IMAGE_PROCESSOR_MAPPING,
    PROCESSOR_MAPPING,
    VIDEO_PROCESSOR_MAPPING,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

# Tokens in chat templates: special tokens, and added tokens that decoding keeps.
_SPECIAL = re.compile(r"<\|[^<>| ]+\|?>|<[^<>| ]+\|>|<(?:start|end)_of_\w+>")
_WORDS = re.compile(r"</?(?:think|tool_call|tool_response)>")


@dataclass(frozen=True)
class Source:
    """model_type: transformers' name. template: a file of TRL's `chat_templates`. vocabulary: the number of tokens.

    named: further tokens that the processor needs from the tokenizer; the configuration has their ids. settings:
    arguments of the processor. pictures: arguments of its image processor. vision: of the vision configuration, where
    the real model's differ from transformers' defaults.
    """

    model_type: str
    template: str
    vocabulary: int
    pad: str
    eos: str
    bos: str | None = None
    named: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    pictures: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        template = (Path(trl.__file__).parent / "chat_templates" / f"{self.template}.jinja").read_text()
        first = [token for token in (self.bos, self.pad, self.eos) if token]
        special = list(dict.fromkeys([*first, *self.named.values(), *_SPECIAL.findall(template)]))
        words = sorted({*_WORDS.findall(template)})
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        letters += [f"\u0120w{number:x}" for number in range(self.vocabulary - len(letters + special + words))]
        inner = Tokenizer(models.BPE({token: place for place, token in enumerate(letters)}, []))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
        inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        inner.add_special_tokens(special)
        inner.add_tokens(words)
        return PreTrainedTokenizerFast(
            tokenizer_object=inner,
            bos_token=self.bos,
            eos_token=self.eos,
            pad_token=self.pad,
            extra_special_tokens=self.named,
            chat_template=template,
            clean_up_tokenization_spaces=False,
            model_max_length=32_768,
        )

    def config(self, **changes: Any) -> Any:
        kind, tokenizer = CONFIG_MAPPING[self.model_type], self.tokenizer()
        ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in self.named.items()}
        names: Any = kind.sub_configs
        if "text_config" not in names:
            return kind(**{"vocab_size": self.vocabulary, **changes})
        parts = {name: changes.pop(name, {}) for name in names}
        text = {"vocab_size": self.vocabulary, **parts["text_config"]}
        parts["text_config"] = {name: value for name, value in text.items() if value is not None}
        if self.vision:
            parts["vision_config"] = {**self.vision, **parts["vision_config"]}
        return kind(**ids, **changes, **parts)

    def generation_config(self) -> GenerationConfig:
        tokenizer = self.tokenizer()
        return GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)

    def processor(self) -> Any:
        config, tokenizer = CONFIG_MAPPING[self.model_type], self.tokenizer()
        kind = PROCESSOR_MAPPING[config]
        make = {
            "tokenizer": lambda: tokenizer,
            "image_processor": lambda: IMAGE_PROCESSOR_MAPPING[config]["torchvision"](**self.pictures),
            "video_processor": lambda: VIDEO_PROCESSOR_MAPPING[config]["torchvision"](),
            "feature_extractor": lambda: FEATURE_EXTRACTOR_MAPPING[config](),
        }
        parts = {name: make[name]() for name in kind.get_attributes()}
        return kind(**parts, chat_template=tokenizer.chat_template, **self.settings)


_QWEN = ("<|endoftext|>", "<|im_end|>")
_QWEN_VISION = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_LLAVA: dict[str, Any] = {
    "named": {"image_token": "<image>"},
    "settings": {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    "pictures": {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    "vision": {"image_size": 336, "patch_size": 14},
}
SOURCES = {
    "Qwen/Qwen2.5-32B-Instruct": Source("qwen2", "qwen2_5", 151_665, *_QWEN),
    "Qwen/Qwen3-8B": Source("qwen3", "qwen3", 151_669, *_QWEN),
    "Qwen/Qwen3-4B": Source("qwen3", "qwen3", 151_669, *_QWEN),
    "Qwen/Qwen3-30B-A3B": Source("qwen3_moe", "qwen3", 151_669, *_QWEN),
    "meta-llama/Llama-3.2-1B-Instruct": Source(
        "llama", "llama3_2", 128_256, "<|end_of_text|>", "<|eot_id|>", "<|begin_of_text|>"
    ),
    "mistralai/Mistral-7B-Instruct-v0.2": Source("mistral", "llava_next", 32_000, "<unk>", "</s>", "<s>"),
    "openai/gpt-oss-20b": Source("gpt_oss", "gptoss", 200_019, "<|endoftext|>", "<|return|>"),
    "zai-org/GLM-4.5": Source("glm4_moe", "glm4moe", 151_365, "<|endoftext|>", "<|observation|>"),
    "google/gemma-2-2b-it": Source("gemma2", "gemma", 256_000, "<pad>", "<end_of_turn>", "<bos>"),
    "CohereLabs/tiny-aya-earth": Source("cohere2", "cohere2", 261_019, "<PAD>", "<|END_OF_TURN_TOKEN|>"),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Source("nemotron_h", "nemotron_3_nano", 131_072, *_QWEN),
    "Qwen/Qwen2-VL-2B-Instruct": Source("qwen2_vl", "qwen2_5_vl", 151_657, *_QWEN, named=_QWEN_VISION),
    "Qwen/Qwen2.5-VL-3B-Instruct": Source("qwen2_5_vl", "qwen2_5_vl", 151_665, *_QWEN, named=_QWEN_VISION),
    "Qwen/Qwen3.5-0.8B": Source("qwen3_5", "qwen3_5_nothink", 248_077, *_QWEN, named=_QWEN_VISION),
    "Qwen/Qwen3.6-35B-A3B": Source("qwen3_5_moe", "qwen3_6", 248_077, *_QWEN, named=_QWEN_VISION),
    "google/gemma-3-4b-it": Source(
        "gemma3",
        "gemma3",
        262_145,
        "<pad>",
        "<end_of_turn>",
        "<bos>",
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        vision={"patch_size": 14, "vision_use_head": False},
    ),
    "google/gemma-4-E2B-it": Source(
        "gemma4",
        "gemma4",
        262_144,
        "<pad>",
        "<turn|>",
        "<bos>",
        {f"{name}_token": f"<|{name}|>" for name in ("image", "video", "audio")}
        | {"boi_token": "<|image>", "eoi_token": "<image|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
    ),
    "llava-hf/llava-v1.6-mistral-7b-hf": Source("llava_next", "llava_next", 32_064, "<pad>", "</s>", "<s>", **_LLAVA),
    "llava-hf/llava-1.5-7b-hf": Source("llava", "llava_next", 32_064, "<pad>", "</s>", "<s>", **_LLAVA),
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": Source(
        "smolvlm",
        "smolvlm",
        49_280,
        "<|im_end|>",
        "<end_of_utterance>",
        "<|im_start|>",
        {
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
        },
        {"image_seq_len": 81},
    ),
}
