"""Finds, checks and loads the sampler that the setting `sampler` names."""

from pkgutil import resolve_name

from transformers import PreTrainedTokenizerBase

from policy_trainer.config import CommonConfig, LoraConfig
from policy_trainer.config.samplers import SAMPLERS
from policy_trainer.data.user_code import import_named
from policy_trainer.rollout.sampling.sampler import ConfiguredSampler, LoadedSampler
from shared.client.retry import OnWait
from shared.errors import UserError

# The members that every ConfiguredSampler must have.
MEMBERS = ("from_config", "check_engine", "load", "logps", "running_batch")
_NO_ADAPTERS = LoraConfig()


def sampler_class(name: str) -> type[ConfiguredSampler]:
    """Returns the class that the setting `sampler` names. Raises UserError for a user's class that cannot be imported
    or lacks members."""
    if name in SAMPLERS:
        return resolve_name(SAMPLERS[name].location)
    users = import_named(name, "sampler")
    if missing := [member for member in MEMBERS if not callable(getattr(users, member, None))]:
        raise UserError(f"sampler: {name} has no {', no '.join(missing)}: a sampler needs them (docs/client.md)")
    return users


def load_sampler(
    config: CommonConfig, tokenizer: PreTrainedTokenizerBase, on_wait: OnWait, *, lora: LoraConfig = _NO_ADAPTERS
) -> LoadedSampler:
    """Creates the sampler with the weights of config.model. Arguments and errors: see ConfiguredSampler.from_config."""
    return sampler_class(config.sampler).from_config(config, tokenizer, on_wait, lora)


def check_engine(config: CommonConfig, *, lora_rank: int = 0) -> None:
    """Raises UserError if this machine lacks the engine, or its server cannot be used. Loads no weights."""
    sampler_class(config.sampler).check_engine(config, lora_rank)
