"""Tiny models to adapt: layers of torch.nn.Linear, and GPT-2's, whose weights are transposed."""

from collections.abc import Callable

from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.policy_trainer.sampling.architectures import ARCHITECTURES, small

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    **{name: ARCHITECTURES[name] for name in ("llama", "gpt2", "gemma3")},
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**small())),
}
