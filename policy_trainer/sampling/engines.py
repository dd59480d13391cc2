"""The samplers, by the names of the setting `sampler`."""

from importlib.util import find_spec

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policy_trainer.config import CommonConfig, LoraConfig
from policy_trainer.data.prompts import prompt_limit
from policy_trainer.quantised import load_base
from policy_trainer.sampling.hf import HFSampler
from policy_trainer.sampling.sampler import Sampler
from policy_trainer.sampling.vllm_client import check_server, check_sleep_mode, check_takes_adapters
from policy_trainer.sampling.vllm_requests import engine_options
from policy_trainer.sampling.vllm_server import VllmServerSampler
from shared.client.connection import OnWait
from shared.errors import UserError
from shared.logprobs import placeholders_of
from shared.models import context_length, embedding_rows, eos_token_ids, load_outline

# The sampler, and the sampled model; its weights are on the meta device if an engine other than `hf` has them.
LoadedSampler = tuple[Sampler, PreTrainedModel]
_NO_ADAPTERS = LoraConfig()


def load_sampler(
    config: CommonConfig, tokenizer: PreTrainedTokenizerBase, on_wait: OnWait, *, lora: LoraConfig = _NO_ADAPTERS
) -> LoadedSampler:
    """The sampler that the setting `sampler` names, with the weights of config.model.

    on_wait: called while a server does not answer; it may raise to give up. lora: of the adapters that will be loaded;
    its rank is 0 if whole models will be. Raises UserError for a model or an engine that cannot be used.
    """
    match config.sampler:
        case "hf":
            model = load_base(config.model, lora, revision=config.revision, device=config.device, dtype=config.dtype)
            sampler = HFSampler(model, tokenizer)
            sampler.check()
            return sampler, model
        case "vllm":
            return _load_vllm(config, tokenizer, lora.rank)
        case "vllm-server":
            return _load_vllm_server(config, tokenizer, on_wait, lora.rank)


def check_engine(config: CommonConfig, *, lora_rank: int = 0) -> None:
    """Raises UserError if this machine lacks the engine, or its server cannot be used. Loads no weights."""
    match config.sampler:
        case "vllm":
            _check_vllm(lora_rank)
        case "vllm-server":
            _check_vllm_server(config, load_outline(config.model, revision=config.revision), lora_rank)


def _load_vllm(config: CommonConfig, tokenizer: PreTrainedTokenizerBase, lora_rank: int) -> LoadedSampler:
    _check_vllm(lora_rank)
    from policy_trainer.sampling.vllm import VllmSampler  # a large library, which other engines do not need

    model = load_outline(config.model, revision=config.revision)
    longest = _longest(config, model)
    limit = config.vllm.max_model_len
    if limit is not None and limit < longest:
        raise UserError(
            f"vllm.max_model_len: prompt and completion need {longest} tokens, got {limit}: raise it, or lower "
            "data.max_prompt_length or sampling.max_completion_length"
        )
    options = engine_options(lora_rank)
    return VllmSampler(config, model, longest, eos_token_ids(model, tokenizer), options), model


def _check_vllm(lora_rank: int) -> None:
    engine_options(lora_rank)
    if find_spec("vllm") is None:
        raise UserError(
            "sampler: vllm is not installed here; pip install 'tandem-grpo[vllm]', or --sampler vllm-server with a "
            "`vllm serve` in a separate environment: docs/vllm.md"
        )


def _load_vllm_server(
    config: CommonConfig, tokenizer: PreTrainedTokenizerBase, on_wait: OnWait, lora_rank: int
) -> LoadedSampler:
    model = load_outline(config.model, revision=config.revision)
    sampler = VllmServerSampler(
        server_url(config),
        _check_vllm_server(config, model, lora_rank),
        eos_token_ids(model, tokenizer),
        embedding_rows(model),
        on_wait,
        placeholders=placeholders_of(model),
        sleep_mode=config.vllm.enable_sleep_mode,
    )
    return sampler, model


def _check_vllm_server(config: CommonConfig, model: PreTrainedModel, lora_rank: int) -> str:
    """The server's name for the model."""
    name = check_server(server_url(config), config.model, _longest(config, model), lora_rank)
    if config.vllm.enable_sleep_mode:
        check_sleep_mode(server_url(config))
    if lora_rank:
        check_takes_adapters(server_url(config), lora_rank)
    return name


def server_url(config: CommonConfig) -> str:
    """The URL of the vLLM server, for sampler vllm-server."""
    assert config.vllm_url is not None
    return config.vllm_url.rstrip("/")


def _longest(config: CommonConfig, model: PreTrainedModel) -> int:
    """The most tokens of prompt and completion together, plus the one that vLLM samples after a sequence it scores."""
    longest = prompt_limit(model, config) + config.sampling.max_completion_length
    return min(longest + 1, context_length(model) or longest + 1)
