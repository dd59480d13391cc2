"""The samplers. To add one, write its class in `policy_trainer/sampling/` and an entry here.

What others must know of a sampler before it runs is an attribute of its entry: they never ask for its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator


@dataclass(frozen=True)
class SamplerTraits:
    """What others must know of a sampler. A trait is False unless the entry says otherwise.

    location: `module:Class` of a ConfiguredSampler (sampling/sampler.py), imported only when it is needed. engine: what
    computes, by its name in messages. about: what --help says of it.
    """

    location: str
    engine: str
    about: str
    server: bool = False
    """A server that the user starts samples, at vllm_url. It has the weights, and a name for the model."""
    takes_first_gpus: bool = False
    """It takes the first GPUs that its process sees, not `device`, and at once vllm.gpu_memory_utilization of them."""
    can_sleep: bool = False
    """Its engine can release its memory on the device (vllm.enable_sleep_mode): the class is a Sleeper."""
    can_fork: bool = False
    """It uses PyTorch on `device`. On the CPU its worker may be forked from a process that has imported all of this."""
    takes_4bit: bool = False
    """It samples from the base model in 4 bits that the trainer trains adapters of (lora.load_in_4bit)."""
    adapts_vision_tower: bool = False
    """It takes adapters of a vision tower's layers, too, not only of the language model's."""
    logps_of_all_tokens: bool = False
    """Its log-probs are of all tokens, as the learner's, also where top_p, top_k, min_p or repetition_penalty change
    what it draws from."""


SAMPLERS: Mapping[str, SamplerTraits] = {
    "hf": SamplerTraits(
        "policy_trainer.sampling.hf:HFSampler", "transformers", "transformers",
        can_fork=True, takes_4bit=True, adapts_vision_tower=True, logps_of_all_tokens=True,
    ),
    "vllm": SamplerTraits(
        "policy_trainer.sampling.vllm:VllmSampler", "vLLM", "vLLM in this process",
        takes_first_gpus=True, can_sleep=True,
    ),
    "vllm-server": SamplerTraits(
        "policy_trainer.sampling.vllm_server:VllmServerSampler", "vLLM", "a running `vllm serve`",
        server=True, can_sleep=True,
    ),
}  # fmt: skip


def _check_name(name: str) -> str:
    if name in SAMPLERS or ":" in name:
        return name
    raise ValueError(f"must be one of {', '.join(SAMPLERS)}, or module:Class for your own sampler")


SamplerName = Annotated[str, AfterValidator(_check_name)]


def sampler_traits(name: str) -> SamplerTraits:
    """name: of a sampler of ours, or `module:Class` of the user's, of which nothing more is known."""
    return SAMPLERS.get(name) or SamplerTraits(name, f"sampler {name}", "")


def samplers_with(trait: str) -> str:
    """The names of the samplers that have a trait, as a text for messages."""
    return " or ".join(name for name, traits in SAMPLERS.items() if getattr(traits, trait))


SAMPLER_HELP = (
    f"What samples. {' '.join(f'{name}: {traits.about}.' for name, traits in SAMPLERS.items())} Or module:Class, your "
    "own (docs/client.md)."
)
