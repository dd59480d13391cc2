"""Tiny classifiers and language models with random weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from policy_trainer.cli.demo.base_model import make_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def classifier(pad: int | None = 0, dtype: torch.dtype = torch.float64, seed: int = 0, labels: int = 1) -> Any:
    torch.manual_seed(seed)
    config = Qwen2Config(vocab_size=len(make_tokenizer()), pad_token_id=pad, **SIZES)
    config.num_labels = labels
    model: Any = Qwen2ForSequenceClassification(config)
    return model.to(dtype).eval()


def language_model(directory: Path, pad: int | None = 0, **changes: Any) -> Path:
    """Saved, with its tokenizer."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model: PreTrainedModel = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=len(tokenizer), pad_token_id=pad, **{**SIZES, **changes})
    )
    model.save_pretrained(directory)
    if pad is None:
        tokenizer.pad_token = None
    tokenizer.save_pretrained(directory)
    return directory
