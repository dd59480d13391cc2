"""Tiny models that vLLM can run, and how far log-probs are from those of transformers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig
from transformers import Qwen2Config, Qwen2ForCausalLM

from policy_trainer.cli.demo.base_model import make_tokenizer
from policy_trainer.data.completion import Completion, group_tokens
from policy_trainer.data.prompts import EncodedPrompt
from policy_trainer.rollout.sampling.sampler import Sampler
from shared.logprobs import PlainForward
from shared.models import load_model, load_tokenizer, save_model
from tests.policy_trainer.weights.adapters.adapters import save_adapter

EOS = 1
CONTEXT = 256
# Printable characters: vLLM looks for stop texts in whole ones. The third prompt is longer than a block of its prefix
# cache, and the fourth begins as it does.
_LONG = 2 * list(range(5, 99))
PROMPTS = [[3, 4, 5], [6, 7, 8, 9], _LONG, [*_LONG, 9], [3, 4, 5]]


def save_tiny(directory: Path, *, tied: bool, seed: int) -> Path:
    """A random Qwen2 whose log-probs are far from uniform."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    save_model(Qwen2ForCausalLM(config), tokenizer, directory)
    return directory


def save_adapted(base: Path, directory: Path, *, seed: int, rank: int = 4) -> tuple[Path, Path]:
    """A random adapter of a model, as a LoRA run publishes it, and the whole model that peft merges it into."""
    adapter, merged = directory / f"adapter-{seed}", directory / f"merged-{seed}"
    model, tokenizer = load_model(str(base), revision=None, device="cpu", dtype="float32"), load_tokenizer(str(base))
    state = save_adapter(
        model, adapter, seed=seed, config=LoraConfig(r=rank, lora_alpha=8, target_modules="all-linear")
    )
    tokenizer.save_pretrained(adapter)
    save_model(load_model(str(base), revision=None, device="cpu", dtype="float32"), tokenizer, merged, state)
    return adapter, merged


def distance(model: Path, groups: Sequence[Sequence[Completion]], temperature: float) -> float:
    """The largest distance of the log-probs that were captured from those of transformers, in float32."""
    forward = PlainForward(load_model(str(model), revision=None, device="cpu", dtype="float32"))
    worst = 0.0
    with torch.inference_mode():
        for prompt, group in zip(PROMPTS, groups, strict=True):
            tokens, captured, _ = group_tokens(EncodedPrompt(prompt), group)
            exact = forward([tokens], [temperature]).numpy()
            worst = max(worst, float(np.abs(exact - captured).max()))
    return worst


def scoring_distance(model: Path, sampler: Sampler, prompt: list[int], group: Sequence[Completion]) -> float:
    """The same of the log-probs that a sampler gives tokens that it is told, at temperature 1."""
    tokens, _, _ = group_tokens(EncodedPrompt(prompt), group)
    forward = PlainForward(load_model(str(model), revision=None, device="cpu", dtype="float32"))
    with torch.inference_mode():
        return float(np.abs(forward([tokens], [1.0]).numpy() - sampler.logps(tokens)).max())
