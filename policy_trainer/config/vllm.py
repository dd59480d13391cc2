"""Who samples, and the settings of vLLM's engine."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from policy_trainer.config.loss import LossConfig
from policy_trainer.config.sampling import SamplingConfig
from policy_trainer.config.sections import Section

SamplerName = Literal["hf", "vllm", "vllm-server"]

# Settings that make vLLM renormalise the log-probs that it reports, and the values that turn them off.
_RENORMALISING: Mapping[str, Any] = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}


class VllmConfig(Section):
    """The engine of sampler vllm, by vLLM's own names. A server of sampler vllm-server has options of its own."""

    gpu_memory_utilization: float = Field(default=0.3, gt=0, le=1)
    """Share of the GPU's memory for the engine, its weights included. 0.9 suits a GPU that nothing else uses."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum tokens of prompt and completion together. Default: what data.max_prompt_length and
    sampling.max_completion_length need."""
    enforce_eager: bool = False
    """Neither compile the model nor capture CUDA graphs: starts sooner, samples more slowly."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Number of GPUs that share the model."""
    enable_sleep_mode: bool = False
    """Trainer and workers take turns on the GPU that they share: vLLM sleeps while the trainer steps, and gives its
    memory back. Also for sampler vllm-server."""


def check_sampler(sampler: SamplerName, url: str | None, device: str) -> None:
    """Raises ValueError for a server without a URL, and for a device that vLLM cannot be told."""
    if sampler == "vllm-server" and not (url or "").startswith(("http://", "https://")):
        got = "none" if url is None else repr(url)
        raise ValueError(f"vllm_url: --sampler vllm-server needs the URL of a running `vllm serve`, got {got}")
    if sampler == "vllm" and device.startswith("cuda:") and device != "cuda:0":
        raise ValueError(
            f"device: vLLM takes the first GPUs that it sees, not {device}: "
            f"set CUDA_VISIBLE_DEVICES={device.removeprefix('cuda:')} and leave device out"
        )


def check_sleep_mode(sampler: SamplerName, weights: str, vllm: VllmConfig) -> None:
    """Raises ValueError where no engine could sleep, and where workers are not on the trainer's machine."""
    if not vllm.enable_sleep_mode:
        return
    if sampler == "hf":
        raise ValueError(
            "vllm.enable_sleep_mode: sampler hf has no engine that sleeps: leave it out, or use --sampler vllm or "
            "vllm-server"
        )
    if weights == "server":
        raise ValueError(
            "vllm.enable_sleep_mode: workers elsewhere do not share the trainer's GPU: leave it out, or use "
            "--weights directory with workers on the trainer's machine"
        )


def check_sampler_logps(sampler: SamplerName, loss: LossConfig, sampling: SamplingConfig) -> None:
    """Raises ValueError where log-probs that vLLM renormalised would be a ratio's denominator."""
    changed = [name for name, off in _RENORMALISING.items() if getattr(sampling, name) != off]
    if sampler == "hf" or loss.old_logps not in ("sampler", "log_linear") or not changed:
        return
    raise ValueError(
        f"sampling.{changed[0]}: vLLM reports log-probs of what it drew from, and the learner's are of all tokens, so "
        f"the ratio of loss.old_logps = {loss.old_logps} would be wrong: set it to {_RENORMALISING[changed[0]]}, or "
        "use loss.old_logps = recomputed, with loss.importance_sampling_correction = tis or mask"
    )
