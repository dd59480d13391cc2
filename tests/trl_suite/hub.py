"""A stand-in for the Hub: TRL's tiny test models and datasets, made on this machine from a checkout of TRL.

TRL's own scripts (`scripts/generate_tiny_models`) build the models. What they read from the Hub, tokenizers and
configurations, is built here: byte-level tokenizers of the real size with the special tokens and the chat templates
that TRL ships, and configurations with transformers' defaults. What they upload is saved into a directory.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import trl
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

ORGANIZATION = "trl-internal-testing"
_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TOOLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


@dataclass(frozen=True)
class Source:
    """What a script reads of a model on the Hub.

    template: of `trl/chat_templates`. special: the first is the pad token, the last ends a turn. words: tokens that are
    kept when a text is decoded. named: further tokens that processors ask of the tokenizer.
    """

    model_type: str
    template: str | None
    vocabulary: int
    special: tuple[str, ...]
    words: tuple[str, ...] = ()
    named: tuple[tuple[str, str], ...] = ()
    bos: str | None = None
    processor: Callable[[PreTrainedTokenizerFast], Any] | None = None

    def tokenizer(self) -> PreTrainedTokenizerFast:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        named = tuple(token for _, token in self.named)
        special = dict.fromkeys((*((self.bos,) if self.bos else ()), *self.special, *named))
        rest = self.vocabulary - len(alphabet) - len({*special, *self.words})
        letters = [*alphabet, *(f"\u0120w{number:06x}" for number in range(rest))]
        inner = Tokenizer(models.BPE({token: place for place, token in enumerate(letters)}, []))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
        inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        inner.add_special_tokens(list(special))
        inner.add_tokens([word for word in self.words if word not in special])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=inner,
            bos_token=self.bos,
            eos_token=self.special[-1],
            pad_token=self.special[0],
            extra_special_tokens=dict(self.named),
            clean_up_tokenization_spaces=False,
            model_max_length=32_768,
        )
        if self.template:
            folder = Path(trl.__file__).parent / "chat_templates"
            tokenizer.chat_template = (folder / f"{self.template}.jinja").read_text()
        return tokenizer

    def config(self, **changes: Any) -> Any:
        tokenizer = self.tokenizer()
        ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in self._ids()}
        base = AutoConfig.for_model(self.model_type)
        if hasattr(base, "text_config"):
            text = {**changes.pop("text_config", {}), "vocab_size": self.vocabulary}
            text = {name: value for name, value in text.items() if value is not None}
            return AutoConfig.for_model(self.model_type, **ids, **changes, text_config=text)
        return AutoConfig.for_model(self.model_type, **{"vocab_size": self.vocabulary, **changes})

    def _ids(self) -> Iterator[tuple[str, str]]:
        for name, token in self.named:
            yield name.removesuffix("_token"), token

    def generation_config(self) -> GenerationConfig:
        tokenizer = self.tokenizer()
        return GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)


def _qwen_vl(family: str, version: str) -> Callable[[PreTrainedTokenizerFast], Any]:
    def make(tokenizer: PreTrainedTokenizerFast) -> Any:
        processor = _class(f"{family}.processing_{family}", version)
        pictures = _class("qwen2_vl.image_processing_qwen2_vl", "Qwen2VLImageProcessor")
        videos = _class("qwen2_vl.video_processing_qwen2_vl", "Qwen2VLVideoProcessor")
        return processor(pictures(), tokenizer, videos(), chat_template=tokenizer.chat_template)

    return make


def _gemma3(tokenizer: PreTrainedTokenizerFast) -> Any:
    pictures = _class("gemma3.image_processing_pil_gemma3", "Gemma3ImageProcessorPil")
    processor = _class("gemma3.processing_gemma3", "Gemma3Processor")
    return processor(pictures(), tokenizer, chat_template=tokenizer.chat_template)


def _gemma4(tokenizer: PreTrainedTokenizerFast) -> Any:
    return _class("gemma4.processing_gemma4", "Gemma4Processor")(
        _class("gemma4.feature_extraction_gemma4", "Gemma4AudioFeatureExtractor")(),
        _class("gemma4.image_processing_gemma4", "Gemma4ImageProcessor")(),
        tokenizer,
        _class("gemma4.video_processing_gemma4", "Gemma4VideoProcessor")(),
        chat_template=tokenizer.chat_template,
    )


def _llava(family: str, name: str) -> Callable[[PreTrainedTokenizerFast], Any]:
    def make(tokenizer: PreTrainedTokenizerFast) -> Any:
        module, kind = {
            "llava": ("clip.image_processing_pil_clip", "CLIPImageProcessorPil"),
            "llava_next": ("llava_next.image_processing_pil_llava_next", "LlavaNextImageProcessorPil"),
        }[family]
        return _class(f"{family}.processing_{family}", name)(
            _class(module, kind)(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}),
            tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            chat_template=tokenizer.chat_template,
            num_additional_image_tokens=1,
        )

    return make


def _smolvlm(tokenizer: PreTrainedTokenizerFast) -> Any:
    return _class("smolvlm.processing_smolvlm", "SmolVLMProcessor")(
        _class("smolvlm.image_processing_smolvlm", "SmolVLMImageProcessor")(),
        tokenizer,
        _class("smolvlm.video_processing_smolvlm", "SmolVLMVideoProcessor")(),
        image_seq_len=81,
        chat_template=tokenizer.chat_template,
    )


def _class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


_QWEN_NAMED = (("image_token", "<|image_pad|>"), ("video_token", "<|video_pad|>"))
_QWEN_MARKED = (*_QWEN_NAMED, ("vision_start_token", "<|vision_start|>"), ("vision_end_token", "<|vision_end|>"))
_LLAMA = ("<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_GEMMA = ("<pad>", "<start_of_turn>", "<end_of_turn>")

_QWEN3_5 = (*_CHATML[:2], *_QWEN_VISION, "<|im_end|>")
SOURCES = {
    "Qwen/Qwen2.5-32B-Instruct": Source("qwen2", "qwen2_5", 151_665, _CHATML, _TOOLS),
    "Qwen/Qwen3-8B": Source("qwen3", "qwen3", 151_669, _CHATML, _TOOLS),
    "Qwen/Qwen3-4B": Source("qwen3", "qwen3", 151_669, _CHATML, _TOOLS),
    "Qwen/Qwen3-30B-A3B": Source("qwen3_moe", "qwen3", 151_669, _CHATML, _TOOLS),
    "meta-llama/Llama-3.2-1B-Instruct": Source("llama", "llama3_2", 128_256, _LLAMA, bos="<|begin_of_text|>"),
    "mistralai/Mistral-7B-Instruct-v0.2": Source("mistral", "llava_next", 32_000, ("<unk>", "</s>"), bos="<s>"),
    "openai/gpt-oss-20b": Source(
        "gpt_oss",
        "gptoss",
        200_019,
        ("<|endoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
    ),
    "zai-org/GLM-4.5": Source(
        "glm4_moe",
        "glm4moe",
        151_365,
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        _TOOLS,
    ),
    "google/gemma-2-2b-it": Source("gemma2", "gemma", 256_000, _GEMMA, bos="<bos>"),
    "CohereLabs/tiny-aya-earth": Source(
        "cohere2",
        "cohere2",
        261_019,
        ("<PAD>", "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    ),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Source("nemotron_h", "nemotron_3_nano", 131_072, _CHATML, _TOOLS),
    "Qwen/Qwen2-VL-2B-Instruct": Source(
        "qwen2_vl",
        "qwen2_5_vl",
        151_657,
        _QWEN3_5,
        named=_QWEN_MARKED,
        processor=_qwen_vl("qwen2_vl", "Qwen2VLProcessor"),
    ),
    "Qwen/Qwen2.5-VL-3B-Instruct": Source(
        "qwen2_5_vl",
        "qwen2_5_vl",
        151_665,
        _QWEN3_5,
        _TOOLS,
        _QWEN_MARKED,
        processor=_qwen_vl("qwen2_5_vl", "Qwen2_5_VLProcessor"),
    ),
    "Qwen/Qwen3.5-0.8B": Source(
        "qwen3_5",
        "qwen3_5_nothink",
        248_077,
        _QWEN3_5,
        _TOOLS,
        _QWEN_MARKED,
        processor=_qwen_vl("qwen3_vl", "Qwen3VLProcessor"),
    ),
    "Qwen/Qwen3.6-35B-A3B": Source(
        "qwen3_5_moe",
        "qwen3_6",
        248_077,
        _QWEN3_5,
        _TOOLS,
        _QWEN_MARKED,
        processor=_qwen_vl("qwen3_vl", "Qwen3VLProcessor"),
    ),
    "google/gemma-3-4b-it": Source(
        "gemma3",
        "gemma3",
        262_145,
        _GEMMA,
        bos="<bos>",
        processor=_gemma3,
        named=(
            ("image_token", "<image_soft_token>"),
            ("boi_token", "<start_of_image>"),
            ("eoi_token", "<end_of_image>"),
        ),
    ),
    "google/gemma-4-E2B-it": Source(
        "gemma4",
        "gemma4",
        262_144,
        ("<pad>", "<|turn>", "<turn|>"),
        bos="<bos>",
        processor=_gemma4,
        named=(
            ("image_token", "<|image|>"),
            ("boi_token", "<|image>"),
            ("eoi_token", "<image|>"),
            ("video_token", "<|video|>"),
            ("audio_token", "<|audio|>"),
            ("boa_token", "<|audio>"),
            ("eoa_token", "<audio|>"),
        ),
    ),
    "llava-hf/llava-v1.6-mistral-7b-hf": Source(
        "llava_next",
        "llava_next",
        32_064,
        ("<pad>", "</s>"),
        bos="<s>",
        named=(("image_token", "<image>"),),
        processor=_llava("llava_next", "LlavaNextProcessor"),
    ),
    "llava-hf/llava-1.5-7b-hf": Source(
        "llava",
        "llava_next",
        32_064,
        ("<pad>", "</s>"),
        bos="<s>",
        named=(("image_token", "<image>"),),
        processor=_llava("llava", "LlavaProcessor"),
    ),
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": Source(
        "smolvlm",
        "smolvlm",
        49_280,
        ("<|endoftext|>", "<|im_start|>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
        named=(("image_token", "<image>"),),
        processor=_smolvlm,
    ),
}

# The scripts whose models `tests/test_grpo_trainer.py` uses.
SCRIPTS = (
    *(
        f"for_causal_lm.{name}"
        for name in (
            "qwen2_for_causal_lm_2_5",
            "qwen3_for_causal_lm",
            "qwen3_moe_for_causal_lm",
            "llama_for_causal_lm_3_2",
            "mistral_for_causal_lm_0_2",
            "gpt_oss_for_causal_lm",
            "glm4_moe_for_causal_lm",
            "gemma2_for_causal_lm",
            "cohere2_for_causal_lm",
            "nemotron_3_nano_for_causal_lm",
            "remote_for_causal_lm",
        )
    ),
    *(
        f"for_sequence_classification.{name}"
        for name in (
            "qwen2_for_sequence_classification_2_5",
            "qwen3_for_sequence_classification",
            "llama_for_sequence_classification_3_2",
        )
    ),
    *(
        f"for_conditional_generation.{name}_for_conditional_generation{end}"
        for name, end in (
            ("qwen2_vl", ""),
            ("qwen2_5_vl", ""),
            ("qwen3_5", "_nothink"),
            ("gemma3", ""),
            ("gemma4", ""),
            ("llava_next", ""),
            ("llava", ""),
            ("smolvlm", ""),
        )
    ),
    "for_conditional_generation.qwen3_6_for_conditional_generation",
)


def build(checkout: Path, hub: Path) -> dict[str, str]:
    """Makes what is missing under `hub`. Returns the models that could not be made, with the reason."""
    hub.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    with _stand_in(checkout, hub):
        for script in SCRIPTS:
            done = hub / f".{script}"
            if done.exists():
                continue
            try:
                importlib.import_module(f"scripts.generate_tiny_models.{script}")
                done.touch()
            except Exception as error:
                failed[script] = f"{type(error).__name__}: {error}"
    _datasets(hub)
    return failed


@contextmanager
def _stand_in(checkout: Path, hub: Path) -> Iterator[None]:
    sys.path.insert(0, str(checkout))
    try:
        common = importlib.import_module("scripts.generate_tiny_models._common")

        def save(model: Any, tokenizer: Any, generation_config: Any, prefix: str = "", suffix: str = "") -> None:
            name = "-".join(part for part in (prefix, type(model).__name__, suffix) if part)
            for part in (model, tokenizer, generation_config):
                if part is not None:
                    part.save_pretrained(hub / ORGANIZATION / name)

        def nothing(*_: Any) -> None: ...

        with ExitStack() as stack:
            enter = stack.enter_context
            for name in ("check_transformers_version", "check_dtype_pattern", "print_config_diff", "smoke_test"):
                enter(patch.object(common, name, nothing))
            enter(patch.object(common, "push_to_hub", save))
            enter(patch.object(AutoTokenizer, "from_pretrained", lambda name, **_: SOURCES[name].tokenizer()))
            enter(patch.object(AutoConfig, "from_pretrained", lambda name, **more: SOURCES[name].config(**more)))
            enter(patch.object(AutoProcessor, "from_pretrained", _processor))
            enter(
                patch.object(GenerationConfig, "from_pretrained", lambda name, **_: SOURCES[name].generation_config())
            )
            yield
    finally:
        sys.path.remove(str(checkout))


def _processor(name: str, **_: Any) -> Any:
    source = SOURCES[name]
    assert source.processor is not None
    return source.processor(source.tokenizer())


_QUESTIONS = [
    ("Beautiful is better than", "ugly"),
    ("Explicit is better than", "implicit"),
    ("Simple is better than", "complex"),
    ("Complex is better than", "complicated"),
    ("Flat is better than", "nested"),
    ("Sparse is better than", "dense"),
]
_ROWS = {"train": 17, "test": 2}
_TALK = "conversational_prompt_only"


def _datasets(hub: Path) -> None:
    """Prompts as TRL's tests have them: the rows' number, columns and forms, with texts of our own."""
    home = hub / ORGANIZATION
    _write(home / "zen", "standard_prompt_only", lambda n: {"prompt": _text(n)})
    _write(home / "zen", _TALK, lambda n: {"prompt": [{"role": "user", "content": _text(n)}]})
    _write(home / "zen-image", _TALK, lambda n: {**_ask(), "image": _picture(n)})
    _write(
        home / "zen-multi-image",
        _TALK,
        lambda n: {**_ask(), "images": [_picture(n + k) for k in range(1 + n % 2)]},
    )
    for folder in home.glob("zen*"):
        configs = "".join(
            f"- config_name: {each.name}\n  data_files:\n"
            + "".join(f"  - {{split: {split}, path: {each.name}/{split}.parquet}}\n" for split in _ROWS)
            for each in sorted(folder.iterdir())
            if each.is_dir()
        )
        (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")


def _text(number: int) -> str:
    return _QUESTIONS[number % len(_QUESTIONS)][0]


def _ask() -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": "What is in the picture?"}]}


def _picture(number: int) -> Image.Image:
    return Image.linear_gradient("L").resize((32 + 4 * (number % 3), 32)).rotate(90 * number).convert("RGB")


def _write(dataset: Path, config: str, row: Callable[[int], dict[str, Any]]) -> None:
    for split, size in _ROWS.items():
        file = dataset / config / f"{split}.parquet"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            Dataset.from_list([row(number) for number in range(size)]).to_parquet(file)
