"""The samplers. To add one, write its class in `policy_trainer/rollout/sampling/` and add an entry here.

The rest of the program never compares a sampler's name: what it must know before the sampler runs is in the entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator


@dataclass(frozen=True)
class SamplerTraits:
    """What the rest of the program must know about a sampler.

    location: `module:Class` of a ConfiguredSampler (sampling/sampler.py), which is imported only when it is needed.
    engine: the name of the inference engine in messages. about: its description in --help.
    """

    location: str
    engine: str
    about: str
    server: bool = False
    """It samples through a server at vllm_url, which has its own weights and model name. The user starts it, or
    `launch`."""
    takes_first_gpus: bool = False
    """It runs on the first GPUs that its process sees rather than on `device`, and reserves the share
    vllm.gpu_memory_utilization of their memory at once."""
    can_sleep: bool = False
    """Its engine can release its device memory (vllm.enable_sleep_mode): the class is a Sleeper."""
    can_fork: bool = False
    """It runs PyTorch on `device`. On the CPU, its worker may be forked from a process that has imported PyTorch."""
    takes_4bit: bool = False
    """It can sample from a base model in 4 bits whose adapters are trained (lora.load_in_4bit)."""
    adapts_vision_tower: bool = False
    """It supports adapters on the layers of a vision tower, not only on those of the language model."""
    sampling_masks: bool = False
    """It returns the tokens that top_p, top_k and min_p kept, and the policy's log-probs over these, whatever
    repetition_penalty is. Log-probs of others are of the distribution that they sample from."""


SAMPLERS: Mapping[str, SamplerTraits] = {
    "hf": SamplerTraits(
        "policy_trainer.rollout.sampling.hf:HFSampler", "transformers", "transformers",
        can_fork=True, takes_4bit=True, adapts_vision_tower=True, sampling_masks=True,
    ),
    "vllm": SamplerTraits(
        "policy_trainer.rollout.sampling.vllm:VllmSampler", "vLLM", "vLLM in this process",
        takes_first_gpus=True, can_sleep=True,
    ),
    "vllm-server": SamplerTraits(
        "policy_trainer.rollout.sampling.vllm_server:VllmServerSampler", "vLLM", "a running `vllm serve`",
        server=True, can_sleep=True,
    ),
}  # fmt: skip


def _check_name(name: str) -> str:
    if name in SAMPLERS or ":" in name:
        return name
    raise ValueError(f"must be one of {', '.join(SAMPLERS)}, or module:Class for your own sampler")


SamplerName = Annotated[str, AfterValidator(_check_name)]


def sampler_traits(name: str) -> SamplerTraits:
    """name: a built-in sampler's, or `module:Class` of a user's sampler, which has the default traits."""
    return SAMPLERS.get(name) or SamplerTraits(name, f"sampler {name}", "")


def samplers_with(trait: str) -> str:
    """Returns the names of the samplers that have a trait, joined by "or" for messages."""
    return " or ".join(name for name, traits in SAMPLERS.items() if getattr(traits, trait))


SAMPLER_HELP = (
    f"What samples. {' '.join(f'{name}: {traits.about}.' for name, traits in SAMPLERS.items())} Or module:Class, your "
    "own (docs/client.md)."
)
