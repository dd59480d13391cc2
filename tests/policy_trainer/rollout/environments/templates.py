"""Tokenizers with the chat templates that TRL ships, over bytes, with each family's special tokens."""

from functools import cache
from importlib.resources import files

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from policy_trainer.config import TurnsConfig
from policy_trainer.rollout.environments.response_reader import ResponseReader

_CHATML = ("<|im_end|>", "<|endoftext|>", "<|im_start|>")
_LLAMA = (
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|begin_of_text|>",
)
_GLM = ("<|observation|>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "[gMASK]", "<sop>")
_GPT_OSS = ("<|call|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")
# Added tokens that are not special.
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# The template, and its special tokens; the first of them ends a turn with a call.
FAMILIES = {
    "qwen2_5": _CHATML,
    "qwen3": _CHATML,
    "qwen3_instruct_2507": _CHATML,
    "qwen3_vl": _CHATML,
    "qwen3_5_think": _CHATML,
    "qwen3_5_nothink": _CHATML,
    "qwen3_6": _CHATML,
    "qwen3_8": _CHATML,
    "nemotron_3_nano": _CHATML,
    "llama3_1": _LLAMA,
    "llama3_2": _LLAMA,
    "glm4moe": _GLM,
    "gptoss": _GPT_OSS,
}
# The ids that end a turn, of each set of special tokens.
_ENDS = {_CHATML: 2, _LLAMA: 3, _GLM: 3, _GPT_OSS: 2}


def template(name: str) -> str:
    return (files("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def make_tokenizer(name: str, special: tuple[str, ...] | None = None) -> PreTrainedTokenizerFast:
    special = special or FAMILIES[name]
    tokenizer = Tokenizer(
        models.BPE({byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in _TAGS])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[1])
    made.chat_template = template(name)
    return made


def ends(name: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The ids that end a turn."""
    special = FAMILIES[name]
    return [tokenizer.get_vocab()[token] for token in special[: _ENDS[special]]]


@cache
def response_reader() -> ResponseReader:
    """A process that all tests use."""
    return ResponseReader(TurnsConfig())
