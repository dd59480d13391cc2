"""How vLLM is started for a run: the options of its engine, in process and as `vllm serve`."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from policy_trainer.config import CommonConfig
from policy_trainer.data.prompts import prompt_limit
from policy_trainer.data.vision import picture_sizes
from shared.errors import UserError
from shared.logprobs import placeholders_of
from shared.models import context_length
from shared.spelling import spell_option, spell_setting

# The values of max_lora_rank that vLLM's engine accepts.
_ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Adapters that a server keeps in main memory. It reloads an adapter that it has dropped, and its engine ends if the
# directory is gone: workers that share a server may sample from this many versions.
CPU_ADAPTERS = 8


def longest_sequence(config: CommonConfig, model: PreTrainedModel | None) -> int:
    """The most tokens of prompt and completion together, plus the one that vLLM samples after a sequence it scores."""
    if model is None:
        return config.data.max_prompt_length + config.sampling.max_completion_length + 1
    longest = prompt_limit(model, config) + config.sampling.max_completion_length
    return min(longest + 1, context_length(model) or longest + 1)


def engine_options(config: CommonConfig, model: PreTrainedModel | None, lora_rank: int) -> dict[str, Any]:
    """Options of vLLM's engine by its names. model: its outline; None if this machine does not have it. lora_rank: of
    the run's adapters; 0 if it has none.

    Raises UserError for settings that the engine cannot have.
    """
    dtype, longest = config.dtype, longest_sequence(config, model)
    if dtype == "auto":  # vLLM's own `auto` would turn float32 into bfloat16
        if model is None:
            raise UserError(
                f"dtype: the precision of {config.model}, which is not on this machine, is unknown",
                f"set {spell_setting('dtype')}",
            )
        dtype = str(model.config.dtype).removeprefix("torch.")
    limit = config.vllm.max_model_len
    if limit is not None and limit < longest:
        raise UserError(
            f"vllm.max_model_len: prompt and completion need {longest} tokens, got {limit}",
            "raise it, or lower data.max_prompt_length or sampling.max_completion_length",
        )
    return {
        "revision": config.revision,
        "tokenizer_revision": config.revision,
        "dtype": dtype,
        "seed": config.seed,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "gpu_memory_utilization": config.vllm.gpu_memory_utilization,
        "max_model_len": limit or longest,
        "enforce_eager": config.vllm.enforce_eager,
        "tensor_parallel_size": config.vllm.tensor_parallel_size,
        "enable_sleep_mode": config.vllm.enable_sleep_mode,
        "mm_processor_kwargs": picture_sizes(config),
        **adapter_options(lora_rank),
    }


def engine_rank(rank: int) -> int:
    """The smallest max_lora_rank for adapters of this rank. Raises UserError if there is none."""
    fitting = [engine for engine in _ENGINE_RANKS if engine >= rank]
    if not fitting:
        raise UserError(
            f"lora.rank: vLLM accepts adapters up to rank {_ENGINE_RANKS[-1]}, got {rank}",
            f"lower it, or use {spell_setting('sampler', 'hf')}",
        )
    return fitting[0]


def adapter_options(rank: int) -> dict[str, Any]:
    """Options of vLLM's engine for adapters of this rank; 0: no adapters."""
    return {"enable_lora": True, "max_lora_rank": engine_rank(rank)} if rank else {}


def serve_arguments(config: CommonConfig, model: PreTrainedModel | None, lora_rank: int) -> list[str]:
    """Arguments of `vllm serve`, except its address, for a server that only this run uses. Arguments and errors: see
    engine_options."""
    options = {
        **engine_options(config, model, lora_rank),
        **_server_adapter_options(lora_rank),
        "enable_scale_out": model is not None and bool(placeholders_of(model)),
        "disable_uvicorn_access_log": True,  # it would have a line for each completion
    }
    return [config.model, *_flags(options)]


def server_environment(rank: int) -> Mapping[str, str]:
    """The environment variables that `vllm serve` needs to replace weights, and to load adapters of this rank; 0: no
    adapters."""
    return {"VLLM_SERVER_DEV_MODE": "1", **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"} if rank else {})}


def server_flags(rank: int) -> str:
    """The options of `vllm serve` for adapters of this rank; 0: no adapters."""
    return shlex.join(_flags(_server_adapter_options(rank)))


def _server_adapter_options(rank: int) -> dict[str, Any]:
    return {**adapter_options(rank), "max_loras": 2, "max_cpu_loras": CPU_ADAPTERS} if rank else {}


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line. Those that are off, empty or None are left out."""
    words: list[str] = []
    for name, value in options.items():
        if value is True:
            words.append(spell_option(name))
        elif value is not False and value is not None and value != {}:
            words += [spell_option(name), json.dumps(value) if isinstance(value, dict) else str(value)]
    return words
