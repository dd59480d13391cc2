"""Adapters as a run publishes them, written by peft itself, and tiny models to adapt."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.policy_trainer.rollout.sampling.architectures import ARCHITECTURES, small

# Layers of torch.nn.Linear, and GPT-2's, whose weights are transposed.
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    **{name: ARCHITECTURES[name] for name in ("llama", "gpt2", "gemma3")},
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**small())),
}


@contextmanager
def ignore_peft() -> Iterator[None]:
    """Ignores warnings that peft causes itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # it sees GPT-2, and sets it
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")  # it asks for it
        yield


def save_adapter(
    model: PreTrainedModel, directory: Path, *, seed: int, config: LoraConfig | None = None
) -> dict[str, Tensor]:
    """Writes a random adapter of the model, and returns the weights that peft merges: the model's own are changed."""
    plain = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with ignore_peft():
        adapted = get_peft_model(model, config or plain)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(str(directory))
    (directory / "README.md").unlink()
    model.config.save_pretrained(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    merged: PreTrainedModel = adapted.merge_and_unload()  # type: ignore[assignment]
    return dict(merged.state_dict())
