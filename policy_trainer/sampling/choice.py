"""The samplers, by the names of the setting `sampler`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import CommonConfig, SamplerName
from policy_trainer.data.prompts import prompt_limit
from policy_trainer.sampling.hf import HFSampler
from policy_trainer.sampling.sampler import Sampler
from policy_trainer.sampling.vllm_adapters import check_takes_adapters, engine_options
from policy_trainer.sampling.vllm_greeting import check_sleep_mode, greet
from policy_trainer.sampling.vllm_server import Ready, VllmServerSampler, always, awake
from shared.client.connection import OnWait
from shared.errors import UserError
from shared.logprobs import embedding_rows
from shared.models import context_length, eos_token_ids, load_model, load_outline


@dataclass(frozen=True)
class LoadedSampler:
    """model: what is sampled from. Where another engine has the weights, they are on the meta device."""

    sampler: Sampler
    model: PreTrainedModel


@dataclass(frozen=True)
class Choice:
    """load: see `load_sampler`. check: see `check_engine`."""

    load: Callable[[CommonConfig, PreTrainedTokenizerBase, OnWait, int], LoadedSampler]
    check: Callable[[CommonConfig, int], object]


def load_sampler(
    config: CommonConfig, tokenizer: PreTrainedTokenizerBase, on_wait: OnWait, *, lora_rank: int = 0
) -> LoadedSampler:
    """The configured sampler, with the weights of config.model.

    on_wait: called while a server does not answer; it may raise to give up. lora_rank: of the adapters that will be
    loaded; 0: whole models will. Raises UserError for a model or an engine that cannot be used.
    """
    return SAMPLERS[config.sampler].load(config, tokenizer, on_wait, lora_rank)


def check_engine(config: CommonConfig, *, lora_rank: int = 0) -> None:
    """Raises UserError where this machine lacks the engine or its server would not do. Loads no weights."""
    SAMPLERS[config.sampler].check(config, lora_rank)


def _load_hf(config: CommonConfig, tokenizer: PreTrainedTokenizerBase, on_wait: OnWait, _: int) -> LoadedSampler:
    model = load_model(config.model, revision=config.revision, device=config.device, dtype=config.dtype)
    return LoadedSampler(HFSampler(model, tokenizer), model)


def _load_vllm(
    config: CommonConfig, tokenizer: PreTrainedTokenizerBase, on_wait: OnWait, lora_rank: int
) -> LoadedSampler:
    _check_vllm(config, lora_rank)
    from policy_trainer.sampling.vllm import VllmSampler  # a large library, which others do not need

    model = load_outline(config.model, revision=config.revision)
    longest = _longest(config, model)
    own = config.vllm.max_model_len
    if own is not None and own < longest:
        raise UserError(
            f"vllm.max_model_len: prompt and completion need {longest} tokens, got {own}: raise it, or lower "
            "data.max_prompt_length or sampling.max_completion_length"
        )
    options = engine_options(lora_rank)
    return LoadedSampler(VllmSampler(config, model, longest, eos_token_ids(model, tokenizer), options), model)


def _check_vllm(config: CommonConfig, lora_rank: int) -> None:
    engine_options(lora_rank)
    if find_spec("vllm") is None:
        raise UserError(
            "sampler: vllm is not installed here; pip install 'tandem-grpo[vllm]', or --sampler vllm-server with a "
            "`vllm serve` that has an environment of its own: docs/vllm.md"
        )


def _load_vllm_server(
    config: CommonConfig, tokenizer: PreTrainedTokenizerBase, on_wait: OnWait, lora_rank: int
) -> LoadedSampler:
    model = load_outline(config.model, revision=config.revision)
    name = _greet(config, model, lora_rank)
    ready = _READY[config.vllm.enable_sleep_mode]
    eos = eos_token_ids(model, tokenizer)
    return LoadedSampler(VllmServerSampler(server_url(config), name, eos, embedding_rows(model), on_wait, ready), model)


def _check_vllm_server(config: CommonConfig, lora_rank: int) -> None:
    _greet(config, load_outline(config.model, revision=config.revision), lora_rank)


def _greet(config: CommonConfig, model: PreTrainedModel, lora_rank: int) -> str:
    name = greet(server_url(config), config.model, _longest(config, model), lora_rank)
    if config.vllm.enable_sleep_mode:
        check_sleep_mode(server_url(config))
    if lora_rank:
        check_takes_adapters(server_url(config), lora_rank)
    return name


def server_url(config: CommonConfig) -> str:
    """Of sampler vllm-server."""
    assert config.vllm_url is not None
    return config.vllm_url.rstrip("/")


def _longest(config: CommonConfig, model: PreTrainedModel) -> int:
    """The most tokens that prompt and completion may have together, and one that vLLM samples behind what it scores."""
    longest = prompt_limit(model, config) + config.sampling.max_completion_length
    return min(longest + 1, context_length(model) or longest + 1)


# By vllm.enable_sleep_mode.
_READY: Mapping[bool, Ready] = {False: always, True: awake}
SAMPLERS: Mapping[SamplerName, Choice] = {
    "hf": Choice(_load_hf, lambda config, lora_rank: None),
    "vllm": Choice(_load_vllm, _check_vllm),
    "vllm-server": Choice(_load_vllm_server, _check_vllm_server),
}
