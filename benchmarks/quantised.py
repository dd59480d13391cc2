"""Weights in 4 bits and plain LoRA: what each holds, and what a training step takes.

A random Qwen2 of 82M parameters, adapters of rank 16, the reference with adapters off, one thread, both sides in one
process in turns.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from benchmarks import measure
from policy_trainer.config import LoraConfig, TrainConfig
from policy_trainer.learner.adapters import add_adapters
from policy_trainer.learner.learner import Learner
from policy_trainer.weights.quantised import load_base
from shared.logprobs import choose_forward
from shared.settings import from_values

SIZES = {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
PROMPT, LENGTHS, REPETITIONS = 64, (128, 96, 64, 48), 3


def save_base(directory: str) -> None:
    config = Qwen2Config(**SIZES, num_attention_heads=12, num_key_value_heads=4, tie_word_embeddings=True)  # type: ignore[arg-type]
    Qwen2ForCausalLM(config).save_pretrained(directory)


def load(base: str, dtype: Any, *, in_4bit: bool) -> PreTrainedModel:
    lora = LoraConfig(rank=16, load_in_4bit=in_4bit)
    model = load_base(base, lora, revision=None, device="cpu", dtype=dtype)
    add_adapters(model, lora, seed=0, base=base, revision=None)
    return model


def frozen_bytes(model: PreTrainedModel) -> int:
    """Of all but the adapters, a tied weight once."""
    state = {tensor.data_ptr(): tensor.nbytes for name, tensor in model.state_dict().items() if ".lora_" not in name}
    return sum(state.values())


def make_step(model: PreTrainedModel) -> Callable[[], object]:
    config = from_values(
        TrainConfig, model="base", lora={"rank": 16}, reference={"source": "adapter-off"}, loss={"beta": 0.04}
    )
    learner = Learner(model, choose_forward(model), config)
    batch = measure.batch_of(measure.random_group(PROMPT, LENGTHS, SIZES["vocab_size"], 0))
    batch = replace(batch, rewards=np.arange(len(LENGTHS), dtype=np.float32))
    return partial(learner.step, [batch], step=0)


def compare(dtype: str) -> list[str]:
    """A row of the table."""
    with TemporaryDirectory() as base:
        save_base(base)
        models = {name: load(base, dtype, in_4bit=name == "4 bits") for name in ("plain", "4 bits")}
    held = {name: frozen_bytes(model) for name, model in models.items()}
    seconds = measure.median_seconds({name: make_step(model) for name, model in models.items()}, REPETITIONS)
    return [
        dtype,
        *(f"{held[name] / 2**20:.0f} MiB, {seconds[name]:.2f} s" for name in models),
        f"{held['4 bits'] / held['plain']:.2f}x",
        f"{seconds['4 bits'] / seconds['plain']:.2f}x",
    ]


def run() -> None:
    rows = [measure.in_child(compare, dtype) for dtype in ("float32", "bfloat16")]
    measure.show(
        "A step of LoRA, and the weights that it holds frozen", ["", "plain", "in 4 bits", "weights", "step"], rows
    )
